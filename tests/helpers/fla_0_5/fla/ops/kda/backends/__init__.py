from fla.ops.backends import BackendRegistry

kda_registry = BackendRegistry("kda")
