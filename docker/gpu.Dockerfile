# vLLM's CUDA image with the plugin:
#   docker build -f docker/gpu.Dockerfile -t vllm-sparse-gpu .
#   docker run --rm --gpus all --ipc=host -p 127.0.0.1:8000:8000 -v vllm-sparse-cache:/home/vllm/.cache \
#       vllm-sparse-gpu MODEL --attention-backend unique
ARG VLLM_VERSION=0.32.0
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS wheel
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.py ./
COPY configs configs
COPY kernels kernels
COPY vllm_sparse_plugin vllm_sparse_plugin
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM vllm/vllm-openai:v${VLLM_VERSION}
COPY --from=wheel /dist /dist
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The versions that the kernels were tested with must not change: the last line prints changed packages, and fails.
RUN uv pip freeze --system > /tmp/before \
    && uv pip install --system --no-cache /dist/*.whl \
    && uv pip freeze --system > /tmp/after \
    && ! grep --invert-match --line-regexp --fixed-strings --file /tmp/after /tmp/before \
        | grep --extended-regexp '^(vllm|torch|triton|flashinfer-python)(==| @)'
# The image has this user, vllm, but runs as root.
USER 2000
WORKDIR /home/vllm
ENV HOME=/home/vllm
# A volume mounted here gets this folder's owner.
RUN mkdir -p /home/vllm/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]
