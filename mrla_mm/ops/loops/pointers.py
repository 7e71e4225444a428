"""Arrays of numba for the addresses of tensors, whose number a loop need not be compiled for."""

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from mrla_mm.ops.loops import compiled


@intrinsic
def as_pointer(typing_context, address):
    """Pointer to float32 at an address."""
    signature = types.CPointer(types.float32)(types.int64)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return signature, generate


@compiled
def map_at(address, shape):
    """The float32 map of a shape at an address."""
    return carray(as_pointer(address), shape)
