FROM python:3.11-slim

RUN useradd --system --uid 10001 --home-dir /var/lib/warmfold warmfold \
    && install -d -m 0700 -o warmfold -g warmfold /var/lib/warmfold

COPY pyproject.toml README.md LICENSE /src/
COPY proxy /src/proxy
RUN pip install --no-cache-dir /src && rm -rf /src

USER warmfold
WORKDIR /var/lib/warmfold
ENV WARMFOLD_STORE__DATA_DIR=/var/lib/warmfold/store
VOLUME /var/lib/warmfold

EXPOSE 8080 9090
# The admin listener is asked on the container's own loopback, where /healthz needs no token. No proxy from the environment.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener as b; b(ProxyHandler({})).open('http://127.0.0.1:9090/healthz', timeout=4)"]

# Open to the network: README.md, "Serving others", says what that requires.
ENTRYPOINT ["warmfold", "serve", "--host", "0.0.0.0"]
