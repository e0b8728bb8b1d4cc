"""The UAV environment for one scene in plain Python floats, written from its rules and sharing no code with it."""

import math

SHARED = {"collision": -500, "obstacle": -2, "border": -1, "goal": 1000, "speed_match": 1}
COEFFICIENTS = {
    "seed": {**SHARED, "goal_distance": -0.001, "formation": -0.001, "step": 0},
    "v0_1": {**SHARED, "goal_distance": -0.005, "formation": -0.001, "step": -1.0},
    "v0_2": {**SHARED, "goal_distance": -0.02, "formation": -0.005, "step": -0.2},
}


def clip(value, low, high):
    return max(low, min(high, value))


def move(bodies, action):
    """Bodies (x, y, speed, heading), the leader first, after one unit of time."""
    moved = []
    for index, ((x, y, speed, heading), (acceleration, turn)) in enumerate(zip(bodies, action, strict=True)):
        leader = index == 0
        speed = clip(speed + (0.3 if leader else 0.6) * acceleration, 10, 20 if leader else 40)
        heading = (heading + (0.6 if leader else 1.2) * turn) % (2 * math.pi)
        x = clip(x + speed * math.cos(heading), 50, 750)
        y = clip(y - speed * math.sin(heading), 50, 650)
        moved.append((x, y, speed, heading))
    return moved


def distance(body, x, y):
    return math.hypot(body[0] - x, body[1] - y)


def observe(bodies, scene):
    obstacle_x, obstacle_y, goal_x, goal_y = scene
    leader = bodies[0]
    flag = 1.0 if distance(leader, obstacle_x, obstacle_y) < 40 else 0.0
    rows = []
    for index, (x, y, speed, heading) in enumerate(bodies):
        own = [x / 1000, y / 1000, speed / 30, math.degrees(heading) / 360]
        if index == 0:
            rows.append([*own, goal_x / 1000, goal_y / 1000, flag])
        else:
            rows.append([*own, leader[0] / 1000, leader[1] / 1000, leader[2] / 30])
    return rows


def reward(bodies, scene, c):
    """Rewards of all agents, and whether the leader reached the goal or hit the obstacle."""
    obstacle_x, obstacle_y, goal_x, goal_y = scene
    leader = bodies[0]
    result = []
    for x, y, _, _ in bodies:
        r = c["step"]
        if math.hypot(x - obstacle_x, y - obstacle_y) < 40:
            r += c["obstacle"]
        if x <= 100 or x >= 700 or y <= 100 or y >= 600:
            r += c["border"]
        result.append(r)
    to_goal = distance(leader, goal_x, goal_y)
    success = to_goal < 40
    collision = distance(leader, obstacle_x, obstacle_y) < 20
    result[0] += c["goal"] if success else c["goal_distance"] * to_goal
    if collision:
        result[0] += c["collision"]
    for index, follower in enumerate(bodies[1:], start=1):
        apart = distance(follower, leader[0], leader[1])
        if apart < 50:
            if abs(follower[2] - leader[2]) < 1:
                result[0] += c["speed_match"]
                result[index] += c["speed_match"]
            if to_goal >= distance(follower, goal_x, goal_y):
                result[index] += c["formation"] * apart
        else:
            result[0] += c["formation"] * apart
            result[index] += c["formation"] * apart
    return result, success, collision


def near_threshold(bodies, scene, margin=1e-2):
    """Whether float32 could fall on the other side of one of the rules' thresholds."""
    obstacle_x, obstacle_y, goal_x, goal_y = scene
    leader = bodies[0]
    gaps = [distance(leader, obstacle_x, obstacle_y) - 20, distance(leader, goal_x, goal_y) - 40]
    for body in bodies:
        gaps += [
            distance(body, obstacle_x, obstacle_y) - 40,
            body[0] - 100,
            body[0] - 700,
            body[1] - 100,
            body[1] - 600,
        ]
    for follower in bodies[1:]:
        gaps += [distance(follower, leader[0], leader[1]) - 50, abs(follower[2] - leader[2]) - 1]
        gaps.append(distance(leader, goal_x, goal_y) - distance(follower, goal_x, goal_y))
    return any(abs(gap) < margin for gap in gaps)
