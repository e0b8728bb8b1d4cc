# Serves a model of a workspace that is mounted: docker run ... IMAGE MODEL [RECIPE]; docs/serving.md has the whole command.
# docs/compose/compose.yaml also trains with it, and runs MLflow's server.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 RUNNER_WORKSPACE=/srv/.runner
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY runner runner
COPY plugins plugins
COPY recipes recipes
# torch comes from the index of builds for CPUs, several GB smaller than the usual ones.
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt 'torch==2.13.0+cpu' \
    && pip install -c constraints.txt '.[plots,postgres,serve,vision]' \
    && useradd --create-home --uid 10001 runner \
    && mkdir -p /srv/.runner /workspace /artifacts && chown runner /srv/.runner /workspace /artifacts

USER runner
WORKDIR /srv
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# In a container 127.0.0.1 is nobody else's: publish the port on the host's own 127.0.0.1.
ENTRYPOINT ["runner", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--help"]
