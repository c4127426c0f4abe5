"""Arithmetic before anything runs: what a machine is, what fits on it, how long it takes and what it costs.

    shapes      a target and a drafter as numbers; their parameters
    memory      bytes of everything that lies on a GPU
    speed       FLOPs, bytes read, and the times that follow
    cost        terabytes, hours, money
    machine     hardware profiles and the machine at hand
    fit         which parts each stage needs at once, and which key would make them fit
    preflight   the checks every stage makes before it starts

All but the last two are pure functions of plain numbers; their tests recompute them by hand.
"""
