"""The data set checks as a hook, for runs that do not start from this package's tools."""

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from mrla_mm.datasets.checks import check_datasets
from mrla_mm.datasets.images import check_images_exist, check_objects, name_image_errors


@HOOKS.register_module()
class DatasetCheckHook(Hook):
    """Checks data sets against files, model and image folders before a run, and names unreadable images during it.

    Raises:
        InputError: before weights are loaded and the first batch is read; see `check_datasets`.
    """

    def before_run(self, runner: Runner) -> None:
        """Check every data set that the run built."""
        built = {}
        for phase in ("train", "val", "test"):
            loader = getattr(getattr(runner, f"_{phase}_loop"), "dataloader", None)
            if isinstance(loader, DataLoader):
                built[phase] = loader.dataset
        if is_main_process():
            check_datasets(runner.cfg, built)
        for phase, dataset in built.items():
            if is_main_process():
                check_images_exist(dataset, phase)
                if phase == "train":
                    check_objects(dataset, phase)
            name_image_errors(dataset)
