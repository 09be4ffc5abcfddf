"""Processes that this one starts, and what they leave behind. Everything that starts processes does it with this.

folder     a folder that no other user may enter
child      a command with a folder and a log; `for_pools` and `mark` are for what is started in other ways
imports    large libraries at the start of a process
reaper     kills what a process has started and removes its folders when it has ended, also by SIGKILL

The kernel can end a process with its parent (PR_SET_PDEATHSIG), but none of its children, and only with the thread that
started it. So whatever is started carries a mark in its environment, and one small process, the reaper, waits for the
end of this one and then kills all that carry the mark. What leaves its group and clears its environment escapes.
"""
