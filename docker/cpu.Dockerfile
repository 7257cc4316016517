# vLLM's CPU build with the plugin and needle-8m:
#   docker build -f docker/cpu.Dockerfile -t vllm-sparse-cpu .
#   docker run --rm -p 8000:8000 vllm-sparse-cpu
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY . .
RUN python3 run.py setup
ENV VLLM_CPU_KVCACHE_SPACE=2
EXPOSE 8000
ENTRYPOINT ["python3", "run.py", "exec", "vllm-sparse", "serve"]
CMD ["models/needle-8m", "--attention-backend", "unique", "--enforce-eager"]
