"""Random numbers: kept as they are, held still, checked for guessable seeds and repeated draws."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from indpriv.recording.norms.batches import tensors_of

# torch draws its own seeds from 53 bits or more; people and libraries choose seeds of 32 bits.
_CHOSEN_SEEDS = 2**32
_DEFAULT_SEED = 67280421310721  # of an unseeded torch.Generator()
_OF_MODELS = WeakSet[torch.Generator]()  # that models draw from, beside torch's own
# Random operations of torch, by what `Still` puts in their place.
_UNIFORM = frozenset(["rand", "rand_like", "uniform"])
_BETWEEN = frozenset(["randint", "randint_like", "random"])  # whole numbers
_CHANCE = frozenset(["bernoulli", "bernoulli_p"])
_REAL = frozenset(["randn", "randn_like", "normal", "normal_functional", "exponential"])
_REAL |= {"log_normal", "geometric", "cauchy"}
_MEANS = frozenset(["poisson", "_standard_gamma", "_sample_dirichlet"])  # of their argument
_LARGE = 1 << 24
_SELDOM = 0.05, 0.2  # places at which what has a chance, such as to be kept, does not happen


class NotedGenerators(TorchFunctionMode):
    """What is drawn from in the block is random state from now on; draws do not move it there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [g for g in (*args, *(kwargs or {}).values()) if isinstance(g, torch.Generator)]
        _OF_MODELS.update(found)
        with kept_random_state() if found else nullcontext():
            return func(*args, **(kwargs or {}))


class Still(TorchDispatchMode):
    """Dropout keeps everything, and other draws are constants, in the block.

    place: from 0 to 1, where constants lie in what may be drawn; a permutation reverses the order.

    Attributes:
        foreign: tensors that were read inside `reading`, and came from elsewhere.
    """

    def __init__(self, place: float = 0.37) -> None:
        super().__init__()
        self._place = place
        self.foreign: list[Tensor] = []
        self._known: dict[int, Tensor] | None = None  # by their storage, while `reading`

    @contextmanager
    def reading(self, given: Iterable[Tensor]) -> Iterator[None]:
        """Note what is read that is neither given nor made in the block."""
        self._known = {_storage(one): one for one in given}
        try:
            yield
        finally:
            self._known = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if self._known is not None:
            read = [one for one in tensors_of((args, kwargs)) if _storage(one) not in self._known]
            self.foreign += read
            self._known |= {_storage(one): one for one in read}
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **(kwargs or {}))
        if self._known is not None:
            self._known |= {_storage(one): one for one in tensors_of(out)}
        numbers = [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]
        if name in _UNIFORM:
            least, most = numbers[:2] if len(numbers) > 1 else (0.0, 1.0)
            out.fill_(least + self._place * (most - least))
        elif name in _BETWEEN:
            least, most = numbers[:2] if len(numbers) > 1 else [0, *numbers, _LARGE][:2]
            out.fill_(int(least + self._place * (most - least)))
        elif name in _CHANCE:
            out.fill_(float(not _SELDOM[0] < self._place < _SELDOM[1]))
        elif name in _REAL:
            out.fill_(0.1 + self._place)
        elif name in _MEANS:
            out.copy_(args[0])
        elif name == "multinomial":
            out.zero_()
        elif name == "randperm":
            out.copy_(torch.arange(len(out), device=out.device).flip(0))
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave the generators of torch, numpy and Python as they were, for training's sake."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def random_state() -> tuple[Any, ...]:
    """States of the generators that a forward pass, or a transform, may draw from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    own = [(generator, generator.get_state()) for generator in _OF_MODELS]
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(), own


def set_random_state(state: tuple[Any, ...]) -> None:
    """Set them to what `random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
    random.setstate(state[2])
    np.random.set_state(state[3])
    for generator, own in state[4]:
        generator.set_state(own)


class _PrivateGenerator(torch.Generator):
    """A generator of `private_generator`; `manual_seed` and `seed` make it an ordinary one."""

    private_seed: int | None = None


def private_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for noise or batches whose state nobody can guess.

    On a CPU its whole state, 624 words of the Mersenne Twister, comes from the operating system;
    torch's own seeds leave 32 bits of it. On another device it is a seed of 64 bits. A script may
    then keep `torch.manual_seed(0)` for initialisation and dropout:

    >>> from indpriv.recording import private_generator
    >>> noise = private_generator()  # make_private(..., noise_generator=noise)
    >>> batches = private_generator()  # DataLoader(..., generator=batches)

    Args:
        device: on which the noise is drawn: that of the parameters. Batches are drawn on the CPU.
    """
    generator = _PrivateGenerator(device=device)
    if generator.device.type == "cpu":
        state = generator.get_state().numpy().copy()
        # seed (8 bytes), left and seeded (4 each), next (8), then a word of state in each 8 bytes.
        words = state[24 : 24 + 8 * 624].view(np.uint64)
        words[:] = np.frombuffer(secrets.token_bytes(4 * 624), dtype=np.uint32)
        state[:8] = np.frombuffer(secrets.token_bytes(7) + b"\x00", dtype=np.uint8)
        generator.set_state(torch.from_numpy(state))
    else:
        generator.manual_seed(secrets.randbits(63))
    generator.private_seed = generator.initial_seed()
    return generator


def source_of(generator: torch.Generator | None) -> str:
    """What is known of a generator's state, in words."""
    if generator is not None and is_private(generator):
        return "its state is from the operating system"
    if generator is not None and generator.device.type == "cpu":
        return "no chosen seed was seen; torch uses 32 bits of a seed, which can be searched"
    return "no chosen seed was seen"


def is_private(generator: torch.Generator) -> bool:
    """Whether `private_generator` made it and nobody has seeded it since."""
    seed = getattr(generator, "private_seed", None)
    return seed is not None and seed == generator.initial_seed()


def generator_of(given: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """The given generator, else the one that torch uses on the device; None if not known."""
    if given is not None or device.type not in ("cpu", "cuda"):
        return given
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


def is_guessable(generator: torch.Generator | None) -> bool:
    """Whether a generator's seed seems to be chosen by a person, or is torch's default.

    torch seeds all devices with the same number, so None stands for the CPU's generator.
    """
    generator = torch.default_generator if generator is None else generator
    seed = generator.initial_seed()
    return (not is_private(generator) and seed < _CHOSEN_SEEDS) or seed == _DEFAULT_SEED


def fingerprint_of_state(state: bytes, run_id: str) -> str:
    """A hash to compare the sessions of one run by; expensive to guess a seed from."""
    salt = run_id.encode()
    return hashlib.scrypt(state, salt=salt, n=2**14, r=8, p=1, dklen=8).hex() if state else ""


class LeftStates:
    """The states in which draws of noise and batches left their generators."""

    def __init__(self) -> None:
        self._left: dict[torch.Generator, torch.Tensor] = {}

    def moved(self, generator: torch.Generator | None, *, new_epoch: bool = False) -> bool:
        """Whether something else drew from a generator since; everything does from torch's own.

        new_epoch: a DataLoader has drawn the seed of its workers from it once.
        """
        left = None if generator is None else self._left.get(generator)
        if generator is None or left is None or torch.equal(left, generator.get_state()):
            return False
        if not new_epoch:
            return True
        expected = torch.Generator(generator.device)
        expected.set_state(left)
        torch.empty((), dtype=torch.int64).random_(generator=expected)
        return not torch.equal(expected.get_state(), generator.get_state())

    def leave(self, generator: torch.Generator | None) -> None:
        """A draw is over."""
        if generator is not None and generator is not generator_of(None, generator.device):
            self._left[generator] = generator.get_state()


class SeenStates:
    """The states in which draws have left one generator; about 100 bytes of memory each."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.first = b""  # empty until something is drawn

    def repeated(self, generator: torch.Generator | None) -> bool:
        """Whether the last draw left the generator in the same state as an earlier one.

        Both then drew the same numbers.
        """
        if generator is None:
            return False
        state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).digest()
        seen_before = state in self._seen
        self._seen.add(state)
        self.first = self.first or state
        return seen_before
