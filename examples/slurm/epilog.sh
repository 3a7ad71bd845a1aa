#!/bin/sh
# Slurm epilog: gives back what a job's local copies take of this node's memory, once the job has ended.
#
# Name it as Epilog in slurm.conf and adjust the two lines below. Slurm runs it on every node of a job, as root and
# without a search path, after the last process of the job has ended.
#
# Everything of the user that nobody uses goes, however new it is: files in /dev/shm outlive their job, are counted
# to no job any more, and the next one may need that memory. A job that is queued again then resumes from its
# checkpoint root, as it must if it gets other nodes. To keep the memory for it, put --no-force in place of
# --force: a place stays as long as its run seems live, or holds a checkpoint that the root does not have. Then let
# cron run `holdfast clean --older-than 24 --no-keep-resumable --yes`, or those that never come back stay for ever.
#
# Other jobs of the same user on this node are safe while they train: what is in use is never touched. Between two
# attempts of a job nothing is in use for some seconds. Where users share nodes with themselves, use --no-force.
HOLDFAST=/opt/holdfast/bin/holdfast
LOCAL_DIR="/dev/shm/holdfast-${SLURM_JOB_USER:-}"

PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
cd / || exit 0
[ -n "${SLURM_JOB_USER:-}" ] && [ -d "$LOCAL_DIR" ] || exit 0

# As the job's user: root has no business in a directory in which a user can place links.
timeout 120 runuser -u "$SLURM_JOB_USER" -- \
    "$HOLDFAST" clean --older-than 0 --force --yes "$LOCAL_DIR" ||
    logger -t holdfast-epilog "job ${SLURM_JOB_ID:-?}: holdfast clean of $LOCAL_DIR ended with code $?"

# Slurm drains a node whose epilog fails. Memory that stayed full is no reason for that: the next epilog tries again.
exit 0
