# vLLM's CPU build with the plugin and needle-8m:
#   docker build -f docker/cpu.Dockerfile -t vllm-sparse-cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 vllm-sparse-cpu
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS wheel
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.py ./
COPY configs configs
COPY kernels kernels
COPY vllm_sparse_plugin vllm_sparse_plugin
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:${PYTHON_VERSION}-slim
ARG TORCH_VERSION=2.13.0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 2000 vllm
COPY requirements /requirements
COPY --from=wheel /dist /dist
# The lock pins the versions. The image installs only the packages that serving needs.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --torch-backend cpu "torch==${TORCH_VERSION}" \
    && uv pip install --system --no-cache --override /requirements/cpu-overrides.txt \
        --constraint /requirements/cpu.lock "$(echo /dist/*.whl)[cpu]"
COPY models/needle-8m /models/needle-8m
USER 2000
WORKDIR /home/vllm
ENV VLLM_CPU_KVCACHE_SPACE=2
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm-sparse", "serve"]
CMD ["/models/needle-8m", "--served-model-name", "needle-8m", "--attention-backend", "unique", "--enforce-eager"]
