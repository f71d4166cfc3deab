from fla.ops.backends import dispatch


@dispatch("kda")
def chunk_kda(*args, **kwargs):
    return "FLA's own"
