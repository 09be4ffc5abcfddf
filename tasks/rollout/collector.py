"""The collector: it plays many episodes at the same time, and keeps a record of every one."""

import asyncio
import contextvars
import ctypes
import itertools
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storage.records import Trajectory
from tasks.rollout.conversation import Conversation, cancel
from tasks.rollout.guards import guarded
from tasks.rollout.plan import Group
from tasks.rollout.turns import Player, TurnBatcher

logger = logging.getLogger(__name__)

Episode = asyncio.Task[list[Trajectory]]

CLEAN_UP_S = 60.0
"""Time for all agents that still clean up at the end of a rollout."""


async def collect(
    player: Player, groups: AsyncIterator[Group], together: int, sink: Callable[[Group, list[Trajectory]], None]
) -> None:
    """Play all groups, `concurrency` episodes at a time; pass each finished group to `sink`, in a thread.

    A group is taken from `groups` when there are slots for `together` of its episodes; the others begin one by one.
    The next group is taken when each episode of this one has begun. All requests of a group go to the replica that had
    the fewest groups.

    An `InferenceError` (the engine refuses a request or serves another version) ends the rollout. Any other error in
    an episode becomes a failed trajectory with its reason.
    """
    loads = [0] * player.generator.replicas
    slots = asyncio.Semaphore(max(player.settings.concurrency, together))
    writer, loop = ThreadPoolExecutor(1, "rollout-writer"), asyncio.get_running_loop()
    before, collecting = asyncio.all_tasks(), asyncio.current_task()
    assert collecting

    async def finish(group: Group, replica: int, episodes: Sequence[Episode]) -> None:
        """Await the episodes of a group, and pass them on."""
        try:
            trajectories = list(itertools.chain(*await asyncio.gather(*episodes)))
            await loop.run_in_executor(writer, contextvars.copy_context().run, sink, group, trajectories)
        except asyncio.CancelledError:
            if collecting.cancelling():
                raise
            remedy = "an agent must cancel only tasks that it started"
            raise RuntimeError(f"an agent, or other code, has cancelled an episode or a group: {remedy}") from None
        finally:
            loads[replica] -= 1

    try:
        with guarded(player.settings.episode_deadline_s):
            async with asyncio.TaskGroup() as playing:
                while True:
                    for _ in range(together):
                        await slots.acquire()
                    if not (group := await anext(groups, None)):
                        break
                    replica, own = loads.index(min(loads)), player.members.get(group.problem.source, player)
                    loads[replica] += 1
                    turns, episodes = TurnBatcher(len(group.prompts), own, replica), list[Episode]()
                    for place, prompt in enumerate(group.prompts):
                        if place >= together:  # the first ones have their slots
                            await slots.acquire()
                        played = Conversation(prompt, turns, own).play(trained=group.plan.selecting)
                        episodes.append(playing.create_task(played, name=prompt.record.trajectory_id))
                        episodes[-1].add_done_callback(lambda _: slots.release())
                    playing.create_task(finish(group, replica, episodes), name=f"group {group.problem.problem_id}")
                    await asyncio.sleep(0)  # so that its requests are on their way before all groups are set up
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await _end_tasks(before)
        writer.shutdown()


async def _end_tasks(before: set[asyncio.Task[Any]]) -> None:
    """End the tasks that agents and requests left running, except those in `before`.

    Cancelled agents that still clean up have `CLEAN_UP_S` for it, unless the rollout is interrupted.

    A task that does not end is hidden from `asyncio.run`, which would wait for it for ever. It also gets an extra
    reference, because Python would run it once more on destruction: without end, if it catches every exception.
    """
    cleaning = {task for task in asyncio.all_tasks() - before if task.cancelling()}
    if cleaning and isinstance(sys.exception(), Exception | None):
        await asyncio.wait(cleaning, timeout=CLEAN_UP_S)
    rest = asyncio.all_tasks() - before
    for task in await cancel(rest) if rest else ():
        remedy = "an agent must end then, and must not catch asyncio.CancelledError"
        logger.warning("%s still runs %g s after its cancellation: %s", task.get_name(), CLEAN_UP_S, remedy)
        asyncio.tasks._unregister_task(task)  # Python documents it for implementers of tasks
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
