"""Random numbers: kept as they are, held still; what draws noise and batches, and how."""

import gc
import hashlib
import random
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, islice
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from indpriv.recording.norms.batches import HALF, tensors_of

# torch draws its own seeds from 53 bits or more; people and libraries choose seeds of 32 bits.
_CHOSEN_SEEDS = 2**32
_DEFAULT_SEED = 67280421310721  # of an unseeded torch.Generator()
_OF_MODELS = WeakSet[torch.Generator]()  # that models draw from, beside torch's own
# That items of data sets draw from, while their owner lives.
_OF_DATA = WeakKeyDictionary[Any, list[Any]]()
_DEPTH = 30  # references to a transform's generator, in functions of data sets in data sets
_EACH = 100  # parts of a container that are looked into
# Whose functions draw from generators that they are given, or from global ones.
_LIBRARIES = sys.stdlib_module_names | {"datasets", "indpriv", "numpy", "opacus", "pandas"}
_LIBRARIES |= {"torch", "torchvision", "transformers"}
# The functions of random and numpy.random are methods of theirs.
_GLOBAL = torch.default_generator, vars(random)["_inst"], vars(np.random.mtrand)["_rand"]
_ATOMS = str | bytes | int | float | complex | None | CodeType | np.ndarray | np.generic | Tensor
_GENERATORS = torch.Generator | random.Random | np.random.BitGenerator | np.random.RandomState
# Random operations of torch, by what `Still` puts in their place.
_UNIFORM = frozenset(["rand", "rand_like", "uniform"])
_BETWEEN = frozenset(["randint", "randint_like", "random"])  # whole numbers
_CHANCE = frozenset(["bernoulli", "bernoulli_p"])
_REAL = frozenset(["randn", "randn_like", "normal", "normal_functional", "exponential"])
_REAL |= {"log_normal", "geometric", "cauchy"}
_MEANS = frozenset(["poisson", "_standard_gamma", "_sample_dirichlet"])  # of their argument
# Attention whose kernel drops out by itself, on a GPU.
_FUSED = "_scaled_dot_product", "_flash_attention", "_efficient_attention"
_LARGE = 1 << 24
_MANY = 4000  # objects that are searched for generators, at each depth
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
    """

    def __init__(self, place: float = 0.37) -> None:
        super().__init__()
        self._place = place
        self.foreign: list[Tensor] = []  # read inside `reading`, and from elsewhere
        self.saw_half = False  # something was computed in half precision
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
        if name.startswith("rrelu_with_noise") and args[4]:  # draws for negative numbers alone
            noise = torch.where(args[0] > 0, 1.0, args[2] + self._place * (args[3] - args[2]))
            args[1].copy_(noise)
            return args[0] * noise
        if name.startswith(_FUSED):
            named = zip(func._schema.arguments, args, strict=False)
            args = [0.0 if known.name == "dropout_p" else value for known, value in named]
        out = func(*args, **(kwargs or {}))
        self.saw_half |= getattr(out, "dtype", None) in HALF
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
        elif name == "binomial":
            out.copy_((args[0] * self._place).floor())
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


State = list[tuple[Any, Any]]
"""Generators, the global ones first, and the state of each."""


def random_state() -> State:
    """States of the generators that a forward pass, or a transform, may draw from."""
    return [(generator, _moved(generator)) for generator in _generators()]


def _generators() -> list[Any]:
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [*_GLOBAL, *cuda, *_OF_MODELS, *chain.from_iterable(_OF_DATA.values())]


def set_random_state(state: State) -> None:
    """Set them to what `random_state` returned."""
    for generator, own in state:
        _moved(generator, own)


def draw_from_each() -> None:
    """Move all of them on by a draw."""
    for one in _generators():
        if isinstance(one, torch.Generator):
            torch.rand(1, generator=one, device=one.device)
        else:
            one.random_raw() if isinstance(one, np.random.BitGenerator) else one.random()


def has_drawn(state: State) -> bool:
    """Whether something drew since from one of its generators."""
    both = map(torch.utils._pytree.tree_leaves, ([(one, _moved(one)) for one, _ in state], state))
    now, then = ([x.tolist() if hasattr(x, "tolist") else x for x in each] for each in both)
    return bool(now != then)


def fixed_state() -> State:
    """The same one each time, but for generators of models and data sets."""
    seeded = torch.Generator().manual_seed(0), random.Random(0), np.random.RandomState(0)
    return [*zip(_GLOBAL, map(_moved, seeded), strict=True), *own_part(random_state())]


def own_part(state: State) -> State:
    """What it holds of generators that are not global."""
    return state[len(_GLOBAL) :]


def noted(owner: Any, held: Any) -> list[Any]:
    """Generators in reach of a data set: random state from now on, as long as the owner lives."""
    found, seen, level = dict[int, Any](), dict[int, Any](), [held]
    for _ in range(_DEPTH):
        seen |= {id(one): one for one in level}
        more = dict[int, Any]()
        for each in level:
            with suppress(Exception):  # a lazy object, or a generator without a state
                one = each.bit_generator if isinstance(each, np.random.Generator) else each
                kept = (part for part in _parts(each) if not isinstance(part, _ATOMS))
                most = None if isinstance(each, FunctionType | type) else _EACH
                more |= {id(part): part for part in islice(kept, most)}
                if isinstance(one, _GENERATORS) and one not in _GLOBAL:
                    _moved(one)
                    found[id(one)] = one
        level = [more[key] for key in more if key not in seen][:_MANY]
    return _OF_DATA.setdefault(owner, list(found.values()))


def _parts(held: Any) -> Iterable[Any]:
    """What an object holds, and what functions read."""
    if isinstance(held, Tensor | nn.Module | ModuleType | _GENERATORS):
        return []
    if (
        isinstance(held, FunctionType | type)
        and str(held.__module__).partition(".")[0] in _LIBRARIES
    ):
        return []
    if not isinstance(held, FunctionType):
        return gc.get_referents(held)
    codes, read = [held.__code__], [held.__defaults__, held.__kwdefaults__, held.__closure__]
    for code in codes:  # the list grows while it is searched
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    names, spaces = {name for code in codes for name in code.co_names}, [held.__globals__]
    for space in spaces:  # modules in modules; the list grows
        read += (found := [space[name] for name in names if name in space])
        new = [vars(one) for one in found if isinstance(one, ModuleType)]
        spaces += [one for one in new if all(one is not known for known in spaces)]
    return read


def _moved(generator: Any, *to: Any) -> Any:
    """The state of a generator, put there first if one is given."""
    of_torch = isinstance(generator, torch.Generator)
    get, put = ("get_state", "set_state") if of_torch else ("__getstate__", "__setstate__")
    for state in to:
        getattr(generator, put)(state)
    return getattr(generator, get)()


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


def fingerprint_of_state(state: bytes, run_id: str) -> str:
    """A hash to compare the sessions of one run by; expensive to guess a seed from."""
    salt = run_id.encode()
    return hashlib.scrypt(state, salt=salt, n=2**14, r=8, p=1, dklen=8).hex() if state else ""


class Sources:
    """The generators that draw the noise and the batches of a run, and how draws left them."""

    def __init__(self, optimizer: Any, module: nn.Module, loader: Any, sampler: str) -> None:
        """Of an optimizer and a loader of Opacus; sampler: how batches are drawn."""
        self._optimizer, self._module, self._loader = optimizer, module, loader
        self._draws_batches = sampler in ("poisson", "truncated_poisson")
        self._is_secret = self._draws_batches or sampler == "fixed_size"  # who takes part
        self._seeds: dict[torch.Generator, int] = {}  # when they were asked for first
        self._left: dict[torch.Generator, Tensor] = {}
        self._drew: dict[str, torch.Generator | None] = {}  # last, by kind
        # States that draws found and left, about 200 bytes for each draw, and each one's last.
        self._seen, self._last = set[bytes](), dict[torch.Generator, bytes]()
        self._found_again = False  # the coming draw, or the last one, begins where one has been
        self.first = b""  # state from which the first batch was drawn, if known

    @property
    def is_secure(self) -> bool:
        """Whether the noise is drawn securely; secure_mode alone may draw from torch's default."""
        return _is_secure(self.noise)

    @property
    def noise(self) -> torch.Generator | None:
        """The generator that draws the noise; None if it is not known."""
        return self._optimizer.generator or _default(self._device)

    @property
    def batches(self) -> torch.Generator:
        """The generator that draws the batches, on the CPU."""
        drawing = self._loader.batch_sampler
        owners = drawing, getattr(drawing, "sampler", None), self._loader
        given = (getattr(owner, "generator", None) for owner in owners)
        return next((one for one in given if one is not None), torch.default_generator)

    @property
    def _device(self) -> torch.device:
        return next(self._module.parameters()).device  # a trainer may move the model

    @property
    def seed_of_batches(self) -> int | None:
        """Seed of the generator that draws the batches; a secure generator has none."""
        return None if _is_secure(self.batches) else _stream(self.batches)[1]

    def draw_privately(self) -> None:
        """Give noise and batches private generators where they draw from torch's default ones."""
        given, at = self.noise, self._device
        if given is None or given is _default(at) or (given.device != at and not self.is_secure):
            self._optimizer.generator = private_generator(at)  # the model may have moved since
            self._drew.pop("noise", None)
        drawing = self._loader.batch_sampler
        owner: Any = drawing if self._draws_batches else getattr(drawing, "sampler", None)
        if hasattr(owner, "generator") and self.batches is torch.default_generator:
            owner.generator = private_generator()
            self._drew.pop("batches", None)

    @property
    def is_guessable(self) -> bool:
        """Whether a seed of noise or batches seems chosen by a person, or is torch's default.

        Also one that was set since this was asked first. torch seeds all devices with the same
        number, so a generator that is not known is like the CPU's.
        """
        used = [self.noise, *([self.batches] if self._is_secret else [])]
        used = [one for one in used if not _is_secure(one)]
        seeds = {one: one.initial_seed() for one in used if one is not None}
        set_again = any(self._seeds.setdefault(one, seed) != seed for one, seed in seeds.items())
        for one in (one or torch.default_generator for one in used):
            chosen = one.initial_seed() < _CHOSEN_SEEDS and not _is_private(one)
            set_again |= chosen or one.initial_seed() == _DEFAULT_SEED
        return set_again

    def __str__(self) -> str:
        """What draws noise and batches, in words."""
        noise, batches = map(_known_of, (self.noise, self.batches))
        return noise if noise == batches else f"noise: {noise}; batches: {batches}"

    def moved(self, kind: str, *, new_epoch: bool = False) -> bool:
        """Whether something else drew from a generator since; everything does from torch's own.

        Args:
            kind: "noise" or "batches", as below.
            new_epoch: a DataLoader has drawn the seed of its workers from it once.
        """
        generator, self._found_again = getattr(self, kind), self._is_again(kind)
        left = self._left.get(generator)
        if self._drew.get(kind, generator) is not generator:  # it may have been chosen by its draws
            return True
        if left is None or torch.equal(left, generator.get_state()):
            return False
        if not new_epoch:
            return True
        expected = torch.Generator(generator.device)
        expected.set_state(left)
        torch.empty((), dtype=torch.int64).random_(generator=expected)
        return not torch.equal(expected.get_state(), generator.get_state())

    def leave(self, kind: str) -> None:
        """A draw is over."""
        generator = self._drew[kind] = getattr(self, kind)
        state = state_of(generator)
        if state is not None and generator is not _default(generator.device):
            self._left[generator] = state

    def repeated(self, kind: str) -> bool:
        """Whether the last draw is of numbers that another had, by its ends or by a seed."""
        secret = {self.noise, self.batches} if self._is_secret else {self.noise}
        used = secret | {self.batches, torch.default_generator, _default(self._device)}
        known = {one for one in used if one is not None and not _is_secure(one)}
        streams = Counter(map(_stream, known))
        are_twins = any(streams[_stream(one)] > 1 for one in known if one in secret)
        return self._is_again(kind) or self._found_again or are_twins

    def _is_again(self, kind: str) -> bool:
        """Whether a generator is where it was before, and has moved since; note where it is."""
        if (state := state_of(generator := getattr(self, kind))) is None:
            return False
        found = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
        self.first = self.first or (found if kind == "batches" else b"")
        again = found in self._seen and found != self._last.get(generator)
        self._seen.add(found)
        self._last[generator] = found
        return again


def _stream(generator: torch.Generator) -> tuple[torch.device, int]:
    """Device and seed; the Mersenne Twister of the CPU uses its low 32 bits only."""
    seed, at = generator.initial_seed(), generator.device
    return at, int(seed) % 2**32 if at.type == "cpu" else int(seed)


def state_of(generator: torch.Generator | None) -> Tensor | None:
    """Its state; None if it is not known, or keeps none, as torchcsprng's generators."""
    try:
        return None if generator is None else generator.get_state()
    except RuntimeError:
        return None


def _is_secure(generator: torch.Generator | None) -> bool:
    return generator is not None and state_of(generator) is None


def _is_private(generator: torch.Generator) -> bool:
    """Whether `private_generator` made it and nobody has seeded it since."""
    seed = getattr(generator, "private_seed", None)
    return seed is not None and seed == generator.initial_seed()


def _known_of(generator: torch.Generator | None) -> str:
    """What is known of a generator's state, in words."""
    if _is_secure(generator):
        return "a cryptographically secure generator, which keeps no state"
    if generator is not None and _is_private(generator):
        return "its state is from the operating system"
    if generator is not None and generator.device.type == "cpu":
        return "no chosen seed was seen; torch uses 32 bits of a seed, which can be searched"
    return "no chosen seed was seen"


def _default(device: torch.device) -> torch.Generator | None:
    """The generator that torch uses on a device; None if not known."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator if device.type == "cpu" else None
