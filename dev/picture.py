"""What the pictures of dev/ have in common: matplotlib, colours, axes."""

import sys

try:
    import matplotlib
except ImportError:
    print("no picture, because matplotlib is missing; install it (apt install python3-matplotlib, "
          "or pip install matplotlib) and run: python3 " + " ".join(sys.argv))
    sys.exit(0)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette: distinct for every kind of colour vision, and in print.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]


def tidy(axes, title):
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure, path):
    figure.savefig(path, dpi=130)
    print(f"drawn in {path}")
