"""The YAML files of this folder, for tests."""

from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
MPIJOB = FOLDER / "kubernetes/mpijob.yaml"


def load(path):
    """What ``path`` says. A key that is there twice is a mistake, which YAML would hide."""
    text = path.read_text()
    _refuse_doubles(yaml.compose(text))
    return yaml.safe_load(text)


def _refuse_doubles(node):
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice in one mapping: {node.start_mark}, {keys}"
    if isinstance(node, yaml.CollectionNode):
        for child in node.value:
            for each in child if isinstance(child, tuple) else (child,):
                _refuse_doubles(each)


def pod(job, role):
    """The specification of the pods of ``role``, "Launcher" or "Worker", and of their only container."""
    spec = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container
