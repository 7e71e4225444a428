"""Checkpoints that survive whatever ends a run, and from which a run continues as if nothing had happened."""

import os
from pathlib import Path

from mmengine.dist import barrier, get_world_size, is_main_process
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, IterBasedTrainLoop, Runner

from mrla_mm.errors import InputError
from mrla_mm.weights.atomic import BACKEND, PART, PostponedRemoval, write_atomically
from mrla_mm.weights.replay import Replay, shield_workers
from mrla_mm.weights.stopping import TERMINATED, StopRequest

OUTDATED = "outdated_ckpts"
INTERRUPTED = "interrupted.pth"


@HOOKS.register_module()
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook without its windows for losing work; it takes the same arguments.

    * A checkpoint and `last_checkpoint` are written aside, forced to the disk and renamed; only then are outdated
      checkpoints removed. The disk must have room for one checkpoint more than `max_keep_ckpts` and the best ones.
    * A resumed run repeats what the uninterrupted one did: data order, augmentation and every random number
      (see `mrla_mm.weights.replay`), also from within an epoch.
    * SIGTERM is confirmed by a line at once, saves `interrupted.pth` after the iteration in progress and ends the
      process with code 143; the next regular checkpoint replaces it. During evaluation it ends at once if the epoch is
      saved.
    * A resumed run that has nothing left to train says so.

    Raises:
        InputError: a checkpoint cannot be written, for example on a full disk; `file_client_args` is given.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.file_client_args is not None:
            raise InputError(f"file_client_args={self.file_client_args}: use backend_args, which took its place")
        self.replay = Replay()
        self.stop = StopRequest()
        self.saved_iter = -1
        self.first_iter = 0
        self.place: dict = {}  # epoch and iteration that the checkpoint being saved continues from

    def before_run(self, runner: Runner) -> None:
        """Have the signal taken over while the training runs, and no longer."""
        if isinstance(runner._train_loop, BaseLoop):
            self.stop.listen_while_running(runner._train_loop, runner.logger)

    def before_train(self, runner: Runner) -> None:
        """Prepare the folder and the data loaders; clean up after a run that was killed."""
        super().before_train(runner)
        if isinstance(self.file_backend, LocalBackend):
            self.backend_args = dict(backend=BACKEND)
        self.file_backend = PostponedRemoval(self.file_backend)
        if is_main_process():
            self._clean_up(runner)
        self.saved_iter = runner.iter if runner.iter else -1
        self.first_iter = runner.iter
        for loop in (runner.train_loop, runner.val_loop):
            shield_workers(getattr(loop, "dataloader", None))
        self.replay.start(runner)

    def before_train_epoch(self, runner: Runner) -> None:
        """Begin the epoch's random numbers."""
        self.replay.start_epoch(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch=None) -> None:
        """Begin the step's random numbers."""
        self.replay.start_step(runner)

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Save if it is time to, or if the run is asked to stop."""
        self.replay.end_step()
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        if self.stop.agreed():
            self._stop(runner, dict(epoch=runner.epoch, iter=runner.iter + 1))

    def after_train_epoch(self, runner: Runner) -> None:
        """Save if it is time to."""
        self.replay.end_epoch()
        super().after_train_epoch(runner)

    def after_train(self, runner: Runner) -> None:
        """Publish if asked to, and say so if the run was complete before."""
        super().after_train(runner)
        if runner.iter == self.first_iter > 0:
            unit = "iter" if isinstance(runner.train_loop, IterBasedTrainLoop) else "epoch"
            done, end = getattr(runner, unit), getattr(runner, f"max_{unit}s")
            runner.logger.warning(
                f"the run in {runner.work_dir} is complete: {unit} {done} of {end}; nothing was trained. To go on, "
                f"raise train_cfg.max_{unit}s; to start anew, drop --resume or give another work directory"
            )

    def after_val_iter(self, runner: Runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Stop if asked to. Processes may evaluate unequal numbers of batches, so they cannot save together here."""
        if self.stop.received and (get_world_size() == 1 or self.saved_iter == runner.iter):
            self._stop(runner, dict(epoch=runner.epoch, iter=runner.iter))

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Add what a run needs to continue exactly; FlexibleRunner has counted the epoch as whole, also from within."""
        checkpoint["meta"].update(self.place)
        checkpoint["meta"]["replay"] = self.replay.record(runner, checkpoint["meta"]["iter"])

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Keep what a run needs to continue exactly."""
        self.replay.resumed = checkpoint.get("meta", {}).get("replay", {})

    def _clean_up(self, runner: Runner) -> None:
        """Remove what a killed run left: parts of files, and checkpoints that it had replaced but not yet removed."""
        if isinstance(self.file_backend.backend, LocalBackend):
            for path in Path(self.out_dir).glob(f"*.pth{PART}"):
                path.unlink(missing_ok=True)
        for path in runner.message_hub.runtime_info.get(OUTDATED, []):
            self.file_backend.remove(self.file_backend.join_path(self.out_dir, os.path.basename(path)))
        self.file_backend.prune()

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        """Save, and only then remove what is outdated; mmengine does it the other way round."""
        if self.max_keep_ckpts > 0 and (not self.keep_ckpt_ids or self.keep_ckpt_ids[-1] != step):
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                outdated = self.filename_tmpl.format(self.keep_ckpt_ids.popleft())
                self.file_backend.remove(self.file_backend.join_path(self.out_dir, outdated))
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info("keep_ckpt_ids", list(self.keep_ckpt_ids))
        interrupted = self.file_backend.join_path(self.out_dir, INTERRUPTED)
        if self.file_backend.exists(interrupted):
            self.file_backend.remove(interrupted)
        self._save_as(runner, self.filename_tmpl.format(step), meta)
        self._prune()

    def _save_as(self, runner: Runner, name: str, meta: dict) -> None:
        """Save under a name and make it the checkpoint to resume from."""
        runner.message_hub.update_info(OUTDATED, list(self.file_backend.outdated))
        self.last_ckpt, self.place = self.file_backend.join_path(self.out_dir, name), meta
        runner.message_hub.update_info("last_ckpt", self.last_ckpt)
        runner.save_checkpoint(
            self.out_dir,
            name,
            save_optimizer=self.save_optimizer,
            save_param_scheduler=self.save_param_scheduler,
            meta=dict(meta),
            by_epoch=self.by_epoch,
            backend_args=self.backend_args,
            **self.args,
        )
        self.saved_iter, self.place = meta["iter"], {}
        if self.file_backend.isdir(self.last_ckpt):  # FSDP: every process writes a part, and needs all of them later
            barrier()
        if is_main_process():
            write_atomically(Path(runner.work_dir) / "last_checkpoint", self.last_ckpt.encode())

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        super()._save_best_checkpoint(runner, metrics)
        self._prune()

    def _prune(self) -> None:
        best = [getattr(self, "best_ckpt_path", None), *getattr(self, "best_ckpt_path_dict", {}).values()]
        if is_main_process():
            self.file_backend.prune(kept={self.last_ckpt, *best})
        else:
            self.file_backend.outdated.clear()

    def _stop(self, runner: Runner, meta: dict) -> None:
        """Save unless this iteration is saved already, and end the process."""
        if self.saved_iter != meta["iter"]:
            self._save_as(runner, INTERRUPTED, meta)
        saved = self.last_ckpt or "the checkpoint that it resumed from"
        runner.logger.warning(
            f"SIGTERM received: the run ends after iteration {meta['iter']}, saved in {saved}. Continue with --resume"
        )
        raise SystemExit(TERMINATED)
