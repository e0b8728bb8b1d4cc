"""Other spellings of a molecule, without RDKit."""

from runner.plugins.molecules.smiles import parse
from runner.plugins.molecules.structure import AROMATIC, DOUBLE, SINGLE, TRIPLE, complete

SIGNS = {SINGLE: "-", DOUBLE: "=", TRIPLE: "#", AROMATIC: ":"}


def spelled(text, generator):
    """Writes a molecule with alternating bonds and all hydrogens, from a random atom and in a random order."""
    structure = parse(text)
    complete(structure)
    children, numbers = {}, {}

    def visit(atom, previous):
        children[atom] = []
        for end in generator.sample(structure.neighbours[atom], len(structure.neighbours[atom])):
            if end not in children:
                children[atom].append(end)
                visit(end, atom)
            elif end != previous:
                numbers.setdefault((min(atom, end), max(atom, end)), 10 + len(numbers))

    def written(atom):
        charge = f"{structure.charges[atom]:+d}" if structure.charges[atom] else ""
        pieces = [f"[{structure.elements[atom]}H{structure.hydrogens[atom]}{charge}]"]
        pieces += [f"{SIGNS[structure.bond(*pair)]}%{number}" for pair, number in numbers.items() if atom in pair]
        pieces += [f"({SIGNS[structure.bond(atom, end)]}{written(end)})" for end in children[atom]]
        return "".join(pieces)

    parts = []
    for start in generator.sample(range(len(structure.elements)), len(structure.elements)):
        if start not in children:
            visit(start, None)
            parts.append(start)
    return ".".join(map(written, parts))
