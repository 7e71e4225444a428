"""Checkpoints that survive a crash: written to a temporary file, synced, renamed."""

from pathlib import Path

from mmengine.dist import get_world_size, is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, EMAHook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, Runner

from mrla_mm.atomic import PART, write_atomically
from mrla_mm.engine.stopping import TERMINATED, StopRequest, outlive_sigterm
from mrla_mm.registry import register

INTERRUPTED = "interrupted.pth"
SEEN = "batches_seen"  # (seen, all) of the epoch in progress, saved with a checkpoint
BACKEND = "mrla_mm_atomic"


@register_backend(BACKEND)
class AtomicBackend(LocalBackend):
    """mmengine's local files, written atomically; removing one notes it in `outdated`.

    mmengine makes a new backend for each file. All of a run share `outdated`, a list because
    mmengine turns the arguments into JSON.
    """

    def __init__(self, outdated: list[str]):
        self.outdated = outdated

    def put(self, obj: bytes | memoryview, filepath: str | Path) -> None:
        """Write a file."""
        write_atomically(filepath, obj)
        if str(filepath) in self.outdated:
            self.outdated.remove(str(filepath))

    def remove(self, filepath: str | Path) -> None:
        """Note a file for removal."""
        self.outdated.append(str(filepath))


@register(HOOKS)
class AtomicCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook that loses no work to a full disk or a kill; same arguments.

    * Files on a local disk are written aside, forced to the disk and renamed. Only then are
      outdated checkpoints removed, so the disk needs room for one more.
    * SIGTERM saves `interrupted.pth` after the iteration in progress (with several processes, after
      at most five) and ends the process with code 143. A run that resumes from it goes on after
      the batches that its epoch has seen; the next regular checkpoint replaces it.
      Loaders' workers live through the signal, except those that a loop by iterations has started
      before any hook runs.
    """

    def before_run(self, runner: Runner) -> None:
        """Handle SIGTERM while the training runs, and no longer."""
        self.stop_request = StopRequest()
        self.drawn_seed = runner.seed  # resuming replaces the runner's, not that of a sampler
        self.outdated = []  # paths to remove once a newer checkpoint is there
        if isinstance(runner._train_loop, BaseLoop):
            self.stop_request.handle_while_running(runner._train_loop)

    def before_train(self, runner: Runner) -> None:
        """Prepare the folder, the loaders' workers, and the order of images in a resumed run."""
        super().before_train(runner)
        self.saved_iter = runner.iter  # iterations that the last checkpoint holds
        sampler = getattr(runner.train_dataloader.batch_sampler, "sampler", None)
        if getattr(sampler, "seed", None) == self.drawn_seed:  # else it has one of its own
            sampler.seed = runner.seed
        for loop in (runner.train_loop, runner.val_loop):
            outlive_sigterm(getattr(loop, "dataloader", None))
        if isinstance(self.file_backend, LocalBackend):
            self.file_backend = AtomicBackend(self.outdated)
            self.backend_args = dict(backend=BACKEND, outdated=self.outdated)
            if is_main_process():
                for path in Path(self.out_dir).glob(f"*.pth{PART}"):  # of a run that was killed
                    path.unlink(missing_ok=True)

    def before_train_epoch(self, runner: Runner) -> None:
        """Skip the batches that an interrupted epoch has seen; mmengine would repeat them.

        With another number of batches, as of another batch size, the epoch is repeated.
        """
        loop = runner.train_loop
        seen, count = runner.message_hub.runtime_info.get(SEEN, (0, 0))
        if not seen or not isinstance(loop, EpochBasedTrainLoop):
            return
        if count != len(loop.dataloader):
            runner.logger.warning(f"the interrupted epoch had {count} batches: it is repeated")
            return
        run_iter = loop.run_iter

        def skip(index: int, batch: object) -> None:
            if index == seen - 1:
                loop.run_iter = run_iter

        loop.run_iter = skip

    def after_train_iter(self, runner: Runner, batch_idx: int, *args, **kwargs) -> None:
        """Save if it is time to, or if the run is asked to stop."""
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            count = len(runner.train_loop.dataloader)
            runner.message_hub.update_info(SEEN, (batch_idx + 1, count))
        super().after_train_iter(runner, batch_idx, *args, **kwargs)
        if self.stop_request.agreed(runner.iter):
            self._save_and_exit(runner, dict(epoch=runner.epoch, iter=runner.iter + 1))

    def after_train_epoch(self, runner: Runner) -> None:
        """Save if it is time to."""
        runner.message_hub.update_info(SEEN, (0, 0))
        super().after_train_epoch(runner)

    def after_val_iter(self, runner: Runner, *_, **__) -> None:
        """Stop if asked to and there is nothing to save, or if it can be saved here."""
        # Processes may evaluate unequal numbers of batches; EMAHook has swapped the weights.
        averaged = any(isinstance(hook, EMAHook) for hook in runner.hooks)
        can_save = get_world_size() == 1 and not averaged
        if self.stop_request.received and (can_save or self.saved_iter == runner.iter):
            self._save_and_exit(runner, dict(epoch=runner.epoch, iter=runner.iter))

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        """Save and only then remove what is outdated; mmengine does it the other way round."""
        if self.max_keep_ckpts > 0 and step not in self.keep_ckpt_ids:
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                self._discard(self.filename_tmpl.format(self.keep_ckpt_ids.popleft()))
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info("keep_ckpt_ids", list(self.keep_ckpt_ids))
        self._discard(INTERRUPTED)
        self._save_as(runner, self.filename_tmpl.format(step), meta)

    def _save_as(self, runner: Runner, name: str, meta: dict) -> None:
        """Save under a name and make it the checkpoint to resume from."""
        self.saved_iter = meta["iter"]
        self.last_ckpt = self.file_backend.join_path(self.out_dir, name)
        runner.message_hub.update_info("last_ckpt", self.last_ckpt)
        runner.save_checkpoint(
            self.out_dir, name, meta=meta, by_epoch=self.by_epoch, backend_args=self.backend_args,
            save_optimizer=self.save_optimizer, save_param_scheduler=self.save_param_scheduler,
            file_client_args=self.file_client_args, **self.args,
        )  # fmt: skip
        if is_main_process():
            write_atomically(Path(runner.work_dir) / "last_checkpoint", self.last_ckpt.encode())
        self._remove_outdated()

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        super()._save_best_checkpoint(runner, metrics)
        self._remove_outdated()

    def _remove_outdated(self) -> None:
        for path in self.outdated:
            Path(path).unlink(missing_ok=True)
        self.outdated.clear()

    def _discard(self, name: str) -> None:
        path = self.file_backend.join_path(self.out_dir, name)
        if is_main_process() and self.file_backend.isfile(path):
            self.file_backend.remove(path)

    def _save_and_exit(self, runner: Runner, meta: dict) -> None:
        """Save unless this iteration is saved already, and end the process."""
        if self.saved_iter != meta["iter"]:
            self._save_as(runner, INTERRUPTED, meta)
        end = f"SIGTERM: the run ends after iteration {meta['iter']}, saved"
        runner.logger.warning(f"{end}. Continue with --resume")
        raise SystemExit(TERMINATED)
