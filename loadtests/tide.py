"""Tide: how the rate of arrivals rises and falls, and when an arrival of a steady stream falls.

    m(t) = 1 + A sin(2 pi t / P)  +  (F - 1) while a flash crowd lasts
    L(t) = integral of m from 0 to t

A stream that is steady in operational time u becomes one of rate m(t) by t = L^-1(u) (time change
of a point process). Its order, and the burstiness between neighbours, stay what they were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tide:
    amplitude: float = 0.0  # A in 0..1: 0.5 swings between half and one and a half times the mean
    period_s: float = 86_400.0
    flash_at_s: float = 0.0
    flash_s: float = 0.0  # how long the crowd stays; 0: no crowd
    flash_factor: float = 1.0  # F: the rate in the flash over the rate beside it

    def __post_init__(self) -> None:
        if not 0 <= self.amplitude < 1:
            raise ValueError(f"amplitude lies in 0..1, below 1; not {self.amplitude}")
        if self.period_s <= 0 or self.flash_at_s < 0 or self.flash_s < 0:
            raise ValueError("period_s is above 0; flash_at_s and flash_s are at least 0")
        if self.flash_factor < 1:
            raise ValueError(f"flash_factor is at least 1, not {self.flash_factor}")

    @property
    def steady(self) -> bool:
        return self.amplitude == 0 and (self.flash_s == 0 or self.flash_factor == 1)

    def crowd_share(self, at_s: float) -> float:
        """Which part of the arrivals at this time the crowd is."""
        if not self.flash_at_s <= at_s < self.flash_at_s + self.flash_s:
            return 0.0
        extra = self.flash_factor - 1
        return extra / (self._swell(at_s) + extra)

    def elapsed(self, at_s: float) -> float:
        """L(t)."""
        turn = 2 * math.pi / self.period_s
        swell = self.amplitude / turn * (1 - math.cos(turn * at_s))
        in_flash = min(max(at_s - self.flash_at_s, 0.0), self.flash_s)
        return at_s + swell + (self.flash_factor - 1) * in_flash

    def at(self, elapsed: float) -> float:
        """L^-1(u), by bisection to far below a microsecond."""
        if self.steady:
            return elapsed
        low = elapsed / (1 + self.amplitude + self.flash_factor - 1)
        high = elapsed / (1 - self.amplitude)
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (middle, high) if self.elapsed(middle) < elapsed else (low, middle)
        return high

    def _swell(self, at_s: float) -> float:
        return 1 + self.amplitude * math.sin(2 * math.pi * at_s / self.period_s)
