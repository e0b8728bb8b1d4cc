"""A synthetic hand and its grasps."""

from __future__ import annotations

from typing import Any

import numpy as np

EDGES = (0.0675, 0.07125, 0.075, 0.07875, 0.0825)
"""Edges of the cubes, in metres."""
EACH = 256
"""Grasps of every cube."""
CHAINS = (
    ("mcp_joint", "pip", "dip", "fingertip"),
    ("mcp_joint_2", "pip_2", "dip_2", "fingertip_2"),
    ("mcp_joint_3", "pip_3", "dip_3", "fingertip_3"),
    ("pip_4", "thumb_pip", "thumb_dip", "thumb_fingertip"),
)
"""Links of the fingers, from the palm on, named as those of the LEAP hand."""
RANGE = 0.5
"""Largest angle of a joint in either direction, in radians."""
LENGTH = 0.03
"""Length of a link, in metres."""


def synthetic_grasps() -> dict[str, Any]:
    """Returns arrays of the published form: a palm above a cube, and four fingers that hang down
    at its sides.
    """
    generator = np.random.default_rng(0)
    edge = np.repeat(np.array(EDGES, np.float32), EACH)
    count = len(edge)
    joints = sum(map(len, CHAINS))
    parents = list[str]()
    children = list[str]()
    origins = list[list[float]]()
    axes = list[list[float]]()
    for finger, chain in enumerate(CHAINS):
        angle = finger * np.pi / 2
        for position, link in enumerate(chain):
            parents.append(chain[position - 1] if position else "palm_lower")
            children.append(link)
            base = [0.05 * np.cos(angle), 0.05 * np.sin(angle), 0.0]
            origins.append([0.0, 0.0, -LENGTH] if position else base)
            axes.append([-np.sin(angle), np.cos(angle), 0.0])
    links = ["palm_lower", *children]
    translation = generator.normal([0.0, 0.0, 0.05], 0.002, (count, 3))
    translation[:, 2] += edge / 2 - EDGES[0] / 2
    posture = np.tile([-0.1, 0.1, 0.1, 0.1], len(CHAINS))
    return {
        "cube_edge": edge,
        "hand_translation": translation,
        "hand_rotation": np.tile(np.eye(3), (count, 1, 1)),
        "joints": posture + generator.normal(0, 0.05, (count, joints)),
        "kinematics_parent": np.array(parents),
        "kinematics_child": np.array(children),
        "kinematics_origin_xyz": np.array(origins),
        "kinematics_origin_rotation": np.tile(np.eye(3), (joints, 1, 1)),
        "kinematics_axis": np.array(axes),
        "kinematics_lower": np.full(joints, -RANGE),
        "kinematics_upper": np.full(joints, RANGE),
        "link": np.array(links),
        "rotation": np.tile(np.eye(3), (len(links), 1, 1)),
        "center": np.array([[0.0] * 3] + [[0.0, 0.0, -LENGTH / 2]] * joints),
        "half_size": np.array(
            [[0.05, 0.05, 0.005]] + [[0.006, 0.006, LENGTH / 2]] * joints
        ),
    }
