# SPDX-License-Identifier: Apache-2.0
# Images with the command `paceline`.
#
#   docker build --target cpu -t paceline:cpu .
#   docker run --rm paceline:cpu generate "def read_lines(path):"
#   docker run --rm -p 8000:8000 -e PACELINE_API_KEY=secret paceline:cpu serve --host 0.0.0.0
#
#   docker build --target cuda -t paceline:cuda .
#   docker run --rm --gpus all -v /path/to/model:/model paceline:cuda generate --model /model "Once upon a time"
#
#   docker build --target ray -t paceline:ray .
#
# The CUDA image needs an NVIDIA GPU since sm_80 and a driver for CUDA 13; without them it runs on the CPU.
# Mount a folder at /cache to keep models from the hub between runs: -v "$HOME/.cache:/cache".

FROM debian:bookworm-slim AS cpu-build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv /opt/paceline && /opt/paceline/bin/pip install --no-cache-dir '/src[server]'

FROM debian:bookworm-slim AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home paceline && mkdir /cache && chown paceline /cache
COPY --from=cpu-build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH HF_HOME=/cache/huggingface
USER paceline
RUN paceline doctor
ENTRYPOINT ["paceline"]

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda-build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv /opt/paceline \
    && CMAKE_ARGS=-DPACELINE_CUDA=ON /opt/paceline/bin/pip install --no-cache-dir '/src[server]' nvidia-cublas

# cuBLASLt comes from NVIDIA's Python package; the CUDA runtime is part of the module.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home paceline && mkdir /cache && chown paceline /cache
COPY --from=cuda-build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH HF_HOME=/cache/huggingface
USER paceline
RUN paceline doctor
ENTRYPOINT ["paceline"]

# For clusters of KubeRay (examples/kuberay), whose probes call wget.
FROM cuda-build AS ray-build
RUN /opt/paceline/bin/pip install --no-cache-dir 'ray[serve]>=2.60'

FROM cuda AS ray
USER root
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
COPY --from=ray-build /opt/paceline /opt/paceline
USER paceline
ENTRYPOINT []
