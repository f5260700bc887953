import sysconfig

from setuptools import Extension, setup

# abi3 from 3.11, the first version whose limited API has the buffer protocol. Free-threaded builds have no limited API.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
LIMITED = [] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")]

# Not optional: without a compiler the build must fail, or a wheel without the extension would carry the abi3 tag.
setup(
    ext_modules=[
        Extension(
            "pasta_otel._native._cupti",
            sources=[f"pasta_otel/_native/{name}.c" for name in ("module", "rows", "decode", "live")],
            depends=[f"pasta_otel/_native/{name}.h" for name in ("rows", "decode", "live")],
            define_macros=[*LIMITED, ("_GNU_SOURCE", "1")],
            extra_compile_args=[
                "-std=c11",
                "-O2",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Wno-cast-function-type",
            ],
            libraries=["dl", "pthread"],
            py_limited_api=not FREE_THREADED,
            optional=False,
        )
    ],
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
