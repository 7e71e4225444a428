"""The compiled backbone: torch.compile for it alone, in place."""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, fx, nn

from mrla_mm.errors import InputError
from mrla_mm.registry import register


@register(HOOKS)
class CompileBackboneHook(Hook):
    """Compile a model's backbone with torch.compile, in training, validation and test.

    Any backbone. It is compiled in place, so checkpoints, EMA, DistributedDataParallel and resuming
    see the module they always do. One graph serves images of all sizes; batches of one image,
    square images where the first are square, and evaluation get graphs of their own. Where it
    cannot be compiled the log says so in a line, and it runs as it is.

    Args:
        dynamic: as in torch.compile; None compiles the first size alone, then one for others.
        backend: name of the compiler, or a function as torch.compile takes it.
        **options: others of torch.compile, such as mode and fullgraph.

    Raises:
        InputError: the model has no attribute `backbone`.
    """

    def __init__(
        self,
        dynamic: bool | None = True,
        backend: str | Callable = "inductor",
        **options: object,
    ) -> None:
        self.dynamic = dynamic
        self.backend = backend
        self.options = options

    def before_run(self, runner: Runner) -> None:
        """Compile the backbone; torch does the work at its first images."""
        model = runner.model
        # inside DistributedDataParallel and test-time augmentation
        while not hasattr(model, "backbone") and hasattr(model, "module"):
            model = model.module
        compile_backbone(model, dynamic=self.dynamic, backend=self.backend, **self.options)


def compile_backbone(
    model: nn.Module,
    *,
    dynamic: bool | None = True,
    backend: str | Callable = "inductor",
    **options: object,
) -> None:
    """Compile the backbone of a model in place; the arguments are those of the hook."""
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        raise InputError(f"{type(model).__name__} has no backbone to compile")
    if not hasattr(backbone, "compile"):
        print_log(f"torch {torch.__version__} cannot compile a module, 2.2 can", "current")
        return
    print_log(
        "The backbone is compiled at the first images it sees, which takes a minute or more; a "
        "later start finds most of it in torch's cache (TORCHINDUCTOR_CACHE_DIR)",
        "current",
    )
    backbone.compile(backend=LoggedBackend(backend), dynamic=dynamic, **options)


class LoggedBackend:
    """A backend of torch.compile that logs each graph, and runs it as it is if it fails."""

    def __init__(self, backend: str | Callable) -> None:
        self.compile = backend
        if backend == "inductor":
            self.compile = compile_by_inductor
        elif isinstance(backend, str):
            self.compile = torch._dynamo.lookup_backend(backend)
        self.graphs = 0

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[Tensor], **options: object
    ) -> Callable:
        """Compile a graph."""
        start = time.perf_counter()
        try:
            compiled = self.compile(graph, inputs, **options)
        except torch._dynamo.exc.RestartAnalysis:  # by which torch starts over
            raise
        except Exception as error:  # whatever a missing or failing compiler raises
            reason = (str(error).strip().splitlines() or [""])[0]
            text = f"the backbone is not compiled: {type(error).__name__}: {reason}"
            print_log(text, "current", level=logging.WARNING)
            return graph.forward
        seconds = time.perf_counter() - start
        self.graphs += 1
        print_log(f"backbone compiled: graph {self.graphs}, {seconds:.0f} s", "current")
        return compiled


def compile_by_inductor(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    mode: str | None = None,
    options: dict | None = None,
) -> Callable:
    """Compile a graph by inductor, with the mode and options of torch.compile."""
    settings = torch._inductor.list_mode_options(mode) if mode else {}
    return torch._inductor.compile(graph, inputs, options={**settings, **(options or {})})
