"""The words of docs/results/heads.md."""

INTRODUCTION = """# Heads without exemplars

A model learns classes in tasks, one task after another, and no image of an old task may be kept. Two things are
then to decide. What happens to the *features* (the vector that the classifier is given) while a new task is
learned: they may move freely (`plain`), be held by a penalty (`lwf-f`, `inf-ssm-exact`, ...), or stay as the first
task left them (`frozen`). And which *head* makes classes of them: the linear classifier that is trained along, or
one fitted to statistics of each class (`ncm`, `lda`, `gda`, `ranpac`) that are taken once, at the end of the
class's task, and moved with the drift of the features since. This page trains every arm once per setting and fits
all heads to the features of the same runs.

*AA* is the mean over tasks of the accuracy after the last task, all classes competing; *all classes* is the
accuracy over all test images. Where the first task has 50 classes and the others 10 the two pull in different
directions: AA counts a class of a new task five times as much as one of the base, so a bias towards new classes
raises AA and lowers the accuracy over all classes. Settings are therefore chosen by the mean of both, and both are
shown. `task prior` takes all tasks, rather than all classes, to be equally likely beforehand (`method.prior=task`).
*Drift* is how far the features of images of the first task moved by the end (squared change over their variance).
Test images played no part in any choice: settings are searched on the validation images of one base, or seed, and
reported on three others."""

SUMMARY = """## What to take from it

- **Leave the features alone and fit Gaussian classes: `frozen+gda`, with `method.prior=task` where the first task
  is larger than the others.** On b50-5 it has AA 31.8 and 31.8 over all classes. The prior alone is worth 2.7
  points of AA and costs nothing over all classes; part of what other arms seem to gain in AA is such a shift
  towards new classes.
- **No arm gains in both.** Holding the pooled features while the model learns (`lwf-f`) gains 1.9 ± 0.2 points of
  AA with this head and 2.8 ± 0.1 with equally likely classes, and loses 1.4 and 0.7 over all classes: take it where
  new classes matter more. Distillation of logits (`lwf`) gains 2.2 with equally likely classes and nothing with the
  task prior. The state penalties (`output` of `inf-ssm-exact`, `lwf-ac`) gain 0.4 to 1.0, and lose 0.1 to 0.6 over
  all classes.
- Plain training is best at the smallest learning rate tried and still loses. `ewc` moves as freely as plain
  training at its rate, whatever its weight; its grid, as that of all penalties, had no rate below 3e-4, so
  with plain training's best rate of 3e-5 it may do better than shown. With `inf-ssm` small weights do
  nothing and larger ones made the result of the search worse.
- **Heads matter more than penalties.** Plain training with its own linear classifier, aligned, has AA 20.5: 11.3
  below `frozen+gda` and 13.3 below `lwf-f+gda`; with `lda`, which is linear too, 27.9. Statistics must follow the
  drift: `gda` on the features of `lwf-f` has 31.9 and 31.0, without the map 28.4 and 20.9 (`no drift` in
  `heads.json`).
- Replay of 500 images does not reach it: one epoch a task is short for a classifier trained along (AA 5.6 and 16.7
  over all classes, aligned 10.6 and 16.1; with 2,000 images, on base 1 alone, 6.0 and 18.0), and `er+gda` stays
  below `frozen+gda`.
- On digits `frozen+gda` has 89.2 from scratch and 99.4 from the Omniglot start, `frozen+ranpac` 90.4 and 99.5;
  `lwf-f` is 1.7 ± 0.6 behind with `gda` from scratch and level from the start. The other arms were not run there.
- In these figures `ranpac` chose its ridge by images of the last task, which does not suit a large base. Now errors
  on held-out images of all tasks add up: on b50-5 `frozen+ranpac` has AA 26.7, 26.8 and 27.1 on the three bases
  where it had 21.9, 23.3 and 27.1; on digits nothing changes.

What limits this: small models, one epoch a task, three bases; a search of two new tasks sees less drift than five,
so settings chosen by it may move features too far; and replay had no heavier search."""
PROTOCOL_TEXT = {
    "b50-5": """CIFAR-100. The base is a Vim-nano (depth 4, width 96, patch 8, convolutional stem) trained on 50
classes; then five tasks of 10 classes, 200 images each, one epoch in batches of 40; 50 test images of each class.
Bases 1, 2 and 3 are other class orders with weights of their own (`python -m benchmarks.pretrain cifar100-base
--class-order K`); the search is on base 0 (the package's weights) and its first two new tasks. Each cell: AA / all
classes, mean ± sample deviation over the three bases. `output` and `martin+0.1*c` are distances of `inf-ssm-exact`;
`linear, aligned` gives the rows of new classes the norm of the base's. Made by `python -m benchmarks.heads b50-5
--data-root DIR --out RUNS`.""",
    "digits": """scikit-learn's digits in five tasks of two classes (the main job's stream and epochs), task 0
trained plainly and shared by all arms of a seed; the search is on seed 0, the table shows AA over seeds 10, 100 and
1000. Tasks are of one size, so both priors are the same. Made by `python -m benchmarks.heads digits --out RUNS`.""",
    "digits-omniglot": "The same, the model starting from the [Omniglot weights](../weights.md).",
}
TRIED = """Each is one run on base 0, judged by validation images after two new tasks (AA / all classes with `gda`;
the frozen backbone has 36.1 / 38.9 with the task prior, `lwf-f` 37.3 / 38.7), by scripts that were not kept:

- learning the new classifier rows first, features fixed, then everything (100 steps): 38.3 / 38.5 with `lwf-f`, and
  plain training at 3e-4 rises from 34.9 / 31.4 to 37.1 / 37.9. On bases 1 to 3 and all five tasks nothing of it was
  left (33.5 / 29.3 with `lwf-f`, against 33.8 / 30.3 without);
- training against samples of the old classes' Gaussians as well (as in PASS), at 1e-3: 23.3 / 10.2;
- a learning rate of 3e-3 with `lwf-f`: 28.0 / 19.5;
- adding the residual covariance of the drift map to the covariances it moves: +0.2 / +0.1 with `lwf-f`, +1.1 / +1.3
  for plain training at 1e-4, -0.9 / -0.7 at 3e-4;
- a weaker or stronger ridge of the map (0.005, 0.5): from -1.5 to +0.6 points of AA, and less over all classes;
- normalised features: within 0.3 points; square roots of features (Tukey, FeCAM): 1 to 3 points worse;
- ranpac on samples of the moved Gaussians, rather than on stale sums: 3 points behind `gda`;
- scaling the log-determinants of `gda` (0 to 1): up to 1.7 points of AA, less than the task prior."""
VIEWS_TEXT = """Two things that cost no images, on the same runs. *Looks*: the mean of all tokens beside the class
token, and features averaged over the image and its mirror image, both for the statistics and for the images to
classify. *Two models*: the frozen backbone and one that goes on learning (`lwf-f` for three epochs a task), each with
Gaussian classes of its own, whose log likelihoods are averaged; a prediction then runs two models. β of `gda` is
chosen on base 0 for every row."""
