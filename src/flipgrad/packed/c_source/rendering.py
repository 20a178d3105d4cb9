"""The texts of C files: memory shared out among what is stored, constants, the functions that are called, and the stages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from flipgrad.packed.c_source.stages import OUTPUT_BITS, STORED, Compiler, Function
from flipgrad.packed.c_source.values import LARGEST, Stage, Stored
from flipgrad.packed.network import PackedNetwork
from flipgrad.packed.parts import Array

# Columns of a line of numbers.
WIDTH = 120
ARENAS = {"real": "reals", "fixed": "numbers", "bits": "bits"}
# Of double precision; of single precision they end with f.
MATHEMATICS = {"EXP": "exp", "TANH": "tanh", "EXPM1": "expm1", "LOG1P": "log1p", "ERFC": "erfc"}
LAYER_BYTES, RANDOMNESS_BYTES = 16 * 4, 70 * 4


class Rendered(NamedTuple):
    """The texts, and how many bytes constants and buffers have."""

    header: str
    source: str
    main: str
    flash: int
    ram: int


class _Template(NamedTuple):
    needs: tuple[str, ...]
    text: str


@cache
def templates() -> dict[str, _Template]:
    """The functions of ``functions.c`` by name, with what each needs."""
    text = resources.files("flipgrad.packed.c_source").joinpath("functions.c").read_text(encoding="utf-8")
    found = {}
    for block in re.split(r"^//: ", text, flags=re.MULTILINE)[1:]:
        title, _, body = block.partition("\n")
        name, _, needs = title.partition(" <- ")
        found[name] = _Template(tuple(needs.split()), body.strip())
    return found


def render(net: PackedNetwork, name: str, compiler: Compiler, given: Stored, pixels: Array | None) -> Rendered:
    """The texts of a network's files.

    Args:
        net: the network.
        name: of its function.
        compiler: has the stages.
        given: the network's input.
        pixels: of fixed point, what every pixel is.
    """
    sizes = _share_out(compiler)
    types = {"real": 8 if compiler.numbers == "double" else 4, "fixed": 4 if compiler.wide else 2}
    item = {"bits": 4, **types}
    used = {form: size for form, size in sizes.items() if size}
    ram = sum(size * item[form] for form, size in used.items())
    ram += compiler.widest["row"] * types["real"] * _uses(compiler, "row") + compiler.widest["sums"] * 4 * _uses(
        compiler, "sums"
    )
    ram += (RANDOMNESS_BYTES + net.outputs * types["real"]) * compiler.stochastic
    constants = dict(compiler.constants)
    if pixels is not None:
        constants["pixels"] = ("int16_t", pixels)
    widths = {"real": types["real"], "float": 4, "int32_t": 4, "uint32_t": 4, "int16_t": 2}
    flash = sum(values.size * widths[ctype] for ctype, values in constants.values()) + LAYER_BYTES * len(compiler.layers)
    page = _Page(net, name, compiler, given, constants, used, flash, ram)
    return Rendered(page.header(), page.source(), page.main(), flash, ram)


def _uses(compiler: Compiler, row: str) -> bool:
    return any(re.search(rf"\b{row}\b", line) for stage in compiler.stages for line in stage.lines)


def _share_out(compiler: Compiler) -> dict[str, int]:
    """Give everything that is stored its place: the first that is free while it is needed. Returns the sizes of all memory."""
    last = len(compiler.stages)
    draw = _first_draw(compiler)
    placed: list[Stored] = []
    for each in sorted(compiler.kept, key=lambda stored: stored.written):
        # What is computed once and read for every draw stays.
        each.read = last if compiler.stochastic and each.written < draw <= each.read else max(each.read, each.written)
        replaced = [
            old for old in each.replaces if old.form == each.form and old.size == each.size and old.read == each.written
        ]
        busy = [old for old in placed if old.form == each.form and old.read >= each.written and old not in replaced[:1]]
        if replaced:
            each.offset = replaced[0].offset
        else:
            each.offset = _gap(sorted((old.offset, old.offset + old.size) for old in busy), each.size)
        placed.append(each)
    return {form: max((each.offset + each.size for each in placed if each.form == form), default=0) for form in ARENAS}


def _gap(taken: list[tuple[int, int]], size: int) -> int:
    """The first place with so much room between what is taken."""
    free = 0
    for begin, end in taken:
        if begin - free >= size:
            break
        free = max(free, end)
    return free


def _first_draw(compiler: Compiler) -> int:
    """The number of the first stage that has a sign."""
    return next((number for number, stage in enumerate(compiler.stages) if stage.sign is not None), len(compiler.stages))


class _Page:
    """One network's texts."""

    def __init__(
        self,
        net: PackedNetwork,
        name: str,
        compiler: Compiler,
        given: Stored,
        constants: dict[str, tuple[str, Array]],
        memory: dict[str, int],
        flash: int,
        ram: int,
    ) -> None:
        self.net, self.name, self.compiler, self.given = net, name, compiler, given
        self.constants, self.memory, self.flash, self.ram = constants, memory, flash, ram
        self.fixed = compiler.numbers == "fixed"
        self.real = "double" if compiler.numbers == "double" else "float"
        # What the network is given, as an argument.
        self.element = "uint8_t" if given.form == "image" else "float"
        self.argument = f"const {self.element} *{given.form}"
        shape = net.inputs
        self.inputs = "".join(f"[{n}]" for n in ((*shape[1:], shape[0]) if len(shape) == 3 else shape))

    def facts(self) -> list[str]:
        """What the files tell of the network."""
        told = self.net.facts
        found = [f"made by {told.made_by}" if told.made_by else "made by flipgrad"]
        if told.data:
            found.append(f"trained on {told.data}")
        if told.accuracy:
            found.append("accuracy " + ", ".join(f"{name} {share:.2%}" for name, share in told.accuracy.items()))
        found.append(f"{self.flash:,} bytes of constants, {self.ram:,} bytes of buffers")
        return [_comment(each) for each in found]

    def header(self) -> str:
        """The text of the header."""
        net, name, form = self.net, self.name, self.given.form
        count = int(np.prod(net.inputs))
        order = "rows, columns, channels" if len(net.inputs) == 3 else "numbers"
        what = f"{form}: {count} {'bytes' if form == 'image' else 'floats'} {self.inputs}, {order}"
        if form == "image":
            what += f"; a byte p means {net.facts.pixel_scale:.9g} * p + {net.facts.pixel_shift:.9g}"
        if net.outputs == 1:
            returns = "the class, 0 or 1; probabilities[0] becomes the probability of class 1"
        else:
            returns = f"the class, from 0 to {net.outputs - 1}; probabilities become those of the {net.outputs} classes"
        classes = [_comment(f"classes: {', '.join(net.facts.classes)}")] if net.facts.classes else []
        lines = [
            f"/* {name}: a binary network.",
            *(f" * {line}" for line in (*self.facts(), *classes)),
            " *",
            " * The buffers are static: one thread at a time.",
            " */",
            f"#ifndef {name.upper()}_H",
            f"#define {name.upper()}_H",
            "",
            "#include <stdint.h>",
            "",
            f"#define {name.upper()}_INPUTS {count}",
            f"#define {name.upper()}_OUTPUTS {net.outputs}",
            "",
            f"/* {what}.",
            f" * Returns {returns},",
            " * unless they are NULL. */",
            f"int {name}_predict({self.argument}, float *probabilities);",
        ]
        if self.compiler.stochastic:
            lines += [
                "",
                "/* The same with the mean probabilities of so many draws of all units; with samples < 1 as without them.",
                " * The same seed gives the same draws, those of net(x, samples, seed) in Python; give every image its own. */",
                f"int {name}_predict_samples({self.argument}, int samples, uint64_t seed, float *probabilities);",
            ]
        return "\n".join([*lines, "", "#endif", ""])

    def source(self) -> str:
        """The text of the code."""
        functions = list(self.functions())
        mathematics = [*functions, *self.answers()]
        includes = [f'#include "{self.name}.h"', "", "#include <stddef.h>"]
        includes += ["#include <math.h>"] * any(re.search(r"\b(exp|tanh|expm1|log1p|erfc)f?\(", text) for text in mathematics)
        blocks = [
            "\n".join(
                [
                    f"/* {self.name}: a binary network in C99; see {self.name}.h.",
                    *(f" * {line}" for line in self.facts()),
                    " */",
                ]
            ),
            "\n".join(includes),
            self.types(),
            *([function for function in functions if function.startswith("/* A layer's geometry")]),
            "\n".join(self.arrays()),
            self.buffers(),
            *([function for function in functions if not function.startswith("/* A layer's geometry")]),
            *self.stages(),
            *self.answers(),
        ]
        return "\n\n".join(block for block in blocks if block) + "\n"

    def types(self) -> str:
        """The types of numbers, and their limits."""
        compiler, watch = self.compiler, f"{self.name.upper()}_WATCH"
        lines = [
            f"/* The numbers of the {'probabilities' if self.fixed else 'first layer and the head'}. */",
            f"typedef {self.real} real;",
        ]
        if "fixed" in self.memory:
            bits = 32 if compiler.wide else 16
            lines += ["/* Whole numbers that are stored. */", f"typedef int{bits}_t fixed;"]
            lines += [f"#define LARGEST_STORED {STORED[f'int{bits}']}"]
        if any("LARGEST" in templates()[each].text for each in self.needed()):
            lines.append(f"#define LARGEST {LARGEST}")
        if self.given.form == "image" and not self.fixed:
            lines += ["/* What the network sees of a pixel p is PIXEL_SCALE * p + PIXEL_SHIFT. */"]
            lines += [f"#define PIXEL_SCALE ((real){self.net.facts.pixel_scale!r})"]
            lines += [f"#define PIXEL_SHIFT ((real){self.net.facts.pixel_shift!r})"]
        if compiler.signs:
            lines += [f"/* For tests, which see all states through it. */\n#ifndef {watch}"]
            lines += [f"#define {watch}(layer, states) ((void)(states))\n#endif"]
        return "\n".join(lines)

    def needed(self) -> list[str]:
        """The names of the templates of all functions that are called."""
        return [function.template for function in self.closure().values()]

    def closure(self) -> dict[str, Function]:
        """All functions that are called, with those that these call."""
        found: dict[str, Function] = {}
        waiting = list(self.compiler.functions.values())
        while waiting:
            function = waiting.pop()
            if function.name in found:
                continue
            found[function.name] = function
            for need in templates()[function.template].needs:
                name = function.words.get(need, need)
                waiting.append(Function(name, name, {}))
            if "limited(" in function.words.get("STORED(row[c])", "") and function.template == "store":
                waiting.append(Function("limited", "limited", {}))
        order = {name: number for number, name in enumerate(templates())}
        return dict(sorted(found.items(), key=lambda item: (order[item[1].template], item[0])))

    def functions(self) -> Iterator[str]:
        """The texts of the functions that are called."""
        suffix = "" if self.real == "double" else "f"
        mathematics = {word: name + suffix for word, name in MATHEMATICS.items()}
        for function in self.closure().values():
            text = templates()[function.template].text
            text = text.replace("STORED(row[c])", function.words.get("STORED(row[c])", ""))
            words = {**mathematics, **function.words, function.template: function.name}
            words.pop("STORED(row[c])", None)
            yield re.sub(rf"\b({'|'.join(words)})\b", partial(_word, words), text)

    def arrays(self) -> Iterator[str]:
        """The constants."""
        for name, geometry in self.compiler.layers.items():
            yield f"static const layer {name} = {{{', '.join(map(str, geometry))}}};"
        for name, (ctype, values) in self.constants.items():
            yield f"static const {ctype} {name}[{values.size}] = {{"
            yield from _lines(_numbers(ctype if ctype != "real" else self.real, values.reshape(-1)))
            yield "};"

    def buffers(self) -> str:
        """What is stored: images, and the numbers of one pixel."""
        types = {"real": "real", "fixed": "fixed", "bits": "uint32_t"}
        lines = [f"static {types[form]} {ARENAS[form]}[{size}];" for form, size in self.memory.items()]
        if lines:
            lines.insert(0, "/* The images between layers, which share this room. */")
        lines.append("/* The numbers of one pixel. */")
        lines += [f"static real row[{self.compiler.widest['row']}];"] * _uses(self.compiler, "row")
        lines += [f"static int32_t sums[{self.compiler.widest['sums']}];"] * _uses(self.compiler, "sums")
        return "\n".join(lines)

    def stages(self) -> Iterator[str]:
        """The functions that compute the outputs."""
        stages = self.compiler.stages
        if not self.compiler.stochastic:
            yield self.evaluation("evaluate", "Leaves the outputs in the row.", stages, "")
            return
        draw = _first_draw(self.compiler)
        yield self.evaluation("begin", "What all draws share.", stages[:draw], "")
        text = "Leaves the outputs of one draw, or without noise if draw is NULL, in the row."
        yield self.evaluation("finish", text, stages[draw:], ", randomness *draw")

    def evaluation(self, name: str, text: str, stages: list[Stage], more: str) -> str:
        """A function of some of the stages."""
        body: list[str] = []
        for stage in stages:
            body += ["", f"    /* {_comment(stage.title)} */"]
            if stage.sign is not None and more:
                body += ["    if (draw)", f"        next_layer(draw, {stage.sign});"]
            indent = "        " if stage.pixels else "    "
            body += [f"    for (i = 0; i < {stage.pixels}; i++) {{"] * bool(stage.pixels)
            body += [f"{indent}{self.placed(line)}" for line in stage.lines]
            body += ["    }"] * bool(stage.pixels)
            if stage.sign is not None and stage.result is not None:
                body.append(f"    {self.name.upper()}_WATCH({stage.sign}, {self.placed(stage.result.address)});")
        joined = "\n".join(body)
        head = ["    int i;"] if any(stage.pixels for stage in stages) else []
        head += ["    (void)input;"] if not re.search(r"\binput\b", joined) else []
        head += ["    (void)draw;"] if more and not re.search(r"\bdraw\b", joined) else []
        argument = f"const {self.element} *input"
        return "\n".join([f"/* {text} */", f"static void {name}({argument}{more})", "{", *head, *body, "}"])

    def placed(self, line: str) -> str:
        """A line with the places of what it stores and reads."""

        def place(found: Any) -> str:
            stored = self.compiler.kept[int(found[1])]
            return f"{ARENAS[stored.form]} + {stored.offset}" if stored.offset else ARENAS[stored.form]

        return re.sub(r"\$(\d+)\$", place, line)

    def answers(self) -> list[str]:
        """The functions that are called from outside, and how they make classes of outputs."""
        suffix = "" if self.real == "double" else "f"
        outputs, name, k = ("sums" if self.fixed else "row"), self.name, self.net.outputs
        unit = f" * (real){2.0**-OUTPUT_BITS!r}" if self.fixed else ""
        if k == 1:
            best = f"    return {outputs}[0] > 0;"
            share = f"    probabilities[0] = (float)(1 / (1 + exp{suffix}(-(real){outputs}[0]{unit})));"
            shares = ["static void shares(float *probabilities)", "{", share, "}"]
        else:
            best = f"    for (k = 1; k < {k}; k++)\n        best = {outputs}[k] > {outputs}[best] ? k : best;\n    return best;"
            shares = [
                "static void shares(float *probabilities)",
                "{",
                f"    const int largest = best_output();\n    real total = 0;\n    int k;\n    for (k = 0; k < {k}; k++)",
                f"        total += exp{suffix}((real)({outputs}[k] - {outputs}[largest]){unit});",
                f"    for (k = 0; k < {k}; k++)",
                f"        probabilities[k] = (float)(exp{suffix}((real)({outputs}[k] - {outputs}[largest]){unit}) / total);",
                "}",
            ]
        head = "" if k == 1 else "    int best = 0, k;\n"
        texts = [
            f"/* The class with the largest output. */\nstatic int best_output(void)\n{{\n{head}{best}\n}}",
            "\n".join(["/* The probabilities of the outputs. */", *shares]),
        ]
        given = self.given.form
        evaluate = (
            [f"    begin({given});", f"    finish({given}, NULL);"] if self.compiler.stochastic else [f"    evaluate({given});"]
        )
        predict = [f"int {name}_predict({self.argument}, float *probabilities)", "{", *evaluate]
        predict += ["    if (probabilities != NULL)", "        shares(probabilities);", "    return best_output();", "}"]
        return [*texts, "\n".join(predict), *([self.samples()] if self.compiler.stochastic else [])]

    def samples(self) -> str:
        """The function that draws."""
        name, k, given = self.name, self.net.outputs, self.given.form
        best = "mean[0] > (real)0.5" if k == 1 else "best"
        find = [] if k == 1 else ["        if (mean[k] > mean[best])", "            best = k;"]
        return "\n".join(
            [
                f"int {name}_predict_samples({self.argument}, int samples, uint64_t seed, float *probabilities)",
                "{",
                "    static randomness draw;",
                f"    static real mean[{k}];",
                f"    float each[{k}];",
                f"    int sample, k{'' if k == 1 else ', best = 0'};",
                "    if (samples < 1)",
                f"        return {name}_predict({given}, probabilities);",
                f"    for (k = 0; k < {k}; k++)",
                "        mean[k] = 0;",
                "    draw.seed[0] = (uint32_t)(seed & 0xffffffffu);",
                "    draw.seed[1] = (uint32_t)(seed >> 32);",
                f"    begin({given});",
                "    for (sample = 0; sample < samples; sample++) {",
                "        draw.sample = (uint32_t)sample;",
                f"        finish({given}, &draw);",
                "        shares(each);",
                f"        for (k = 0; k < {k}; k++)",
                "            mean[k] += each[k];",
                "    }",
                f"    for (k = 0; k < {k}; k++) {{",
                "        mean[k] /= (real)samples;",
                *find,
                "        if (probabilities != NULL)",
                "            probabilities[k] = (float)mean[k];",
                "    }",
                f"    return {best};",
                "}",
            ]
        )

    def main(self) -> str:
        """The text of a program that classifies what it reads."""
        name, upper = self.name, self.name.upper()
        classes = self.net.facts.classes or tuple(map(str, range(max(2, self.net.outputs))))
        strings = ", ".join(_string(each) for each in classes)
        unit = "images" if self.given.form == "image" else "inputs"
        drawing = self.compiler.stochastic
        usage = f"./{name} [samples [seed]]" if drawing else f"./{name}"
        call = f"{name}_predict(input, probabilities)"
        if drawing:
            call = f"{name}_predict_samples(input, samples, seed, probabilities)"
        lines = [
            f"/* Classifies {unit} from standard input, {int(np.prod(self.net.inputs))} {self.element} each: {usage} < {unit}",
            " * A line for each: its class, the name of this, and the probabilities. */",
            f'#include "{name}.h"',
            "",
            "#include <stdio.h>",
            *(["#include <stdlib.h>"] if drawing else []),
            "",
            f"int main({'int count, char **words' if drawing else 'void'})",
            "{",
            f"    static const char *const classes[] = {{{strings}}};",
            f"    static {self.element} input[{upper}_INPUTS];",
            f"    static float probabilities[{upper}_OUTPUTS];",
            *(["    const int samples = count > 1 ? atoi(words[1]) : 10;"] if drawing else []),
            *(["    const uint64_t seed = count > 2 ? strtoull(words[2], NULL, 10) : 0;"] if drawing else []),
            f"    while (fread(input, sizeof input[0], {upper}_INPUTS, stdin) == {upper}_INPUTS) {{",
            f"        const int best = {call};",
            "        int k;",
            '        printf("%d %s", best, classes[best]);',
            f"        for (k = 0; k < {upper}_OUTPUTS; k++)",
            '            printf(" %.6f", (double)probabilities[k]);',
            '        printf("\\n");',
            "    }",
            "    return 0;",
            "}",
            "",
        ]
        return "\n".join(lines)


def _word(words: Mapping[str, str], found: re.Match[str]) -> str:
    return words[found[0]]


def _numbers(ctype: str, values: Array) -> Iterable[str]:
    if ctype == "uint32_t":
        return (f"0x{int(value):08x}" for value in values)
    if ctype in ("float", "double"):
        digits = 9 if ctype == "float" else 17
        return (f"{float(value):.{digits}g}" for value in values)
    return (str(int(value)) for value in values)


def _lines(numbers: Iterable[str]) -> Iterator[str]:
    line = "   "
    for number in numbers:
        if len(line) + len(number) + 2 > WIDTH:
            yield line
            line = "   "
        line += f" {number},"
    yield line


def _comment(text: str) -> str:
    """A text that cannot end a comment, in one line of ASCII."""
    plain = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
    return plain.replace("*/", "* /").replace("/*", "/ *")


def _string(text: str) -> str:
    """A text as a string of C."""
    return (
        '"' + "".join(letter if letter.isascii() and (letter.isalnum() or letter in " _-.,+") else "?" for letter in text) + '"'
    )
