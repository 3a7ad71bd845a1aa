"""What befell a run, told once: who failed, what happened, why, what was done, what it cost, what to do now.

An account is made when the decision is, journalled with it, and kept in the attempt's directory. The
terminal, `holdfast why`, `status`, the report and alerts render that one account; nothing else composes such
sentences. Everything here is pure, reads no file, and speaks plain English.
"""
