"""Models of timm and torchvision, as they are published, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn

from zoo.entry import Draw, Entry, Inputs, floats
from zoo.own import Classifier

CLASSES = 1000

# (model, compile cost, conv, timed)
_TIMM: tuple[tuple[str, float, bool, bool], ...] = (
    ("resnet50", 4, True, True),
    ("resnest14d", 3, True, False),
    ("regnety_008", 5, True, True),
    ("nfnet_l0", 6, True, True),
    ("densenet121", 8, True, True),
    ("efficientnet_b0", 6, True, True),
    ("mobilenetv3_large_100", 6, True, True),
    ("hrnet_w18_small", 9, True, False),
    ("inception_v3", 7, True, False),
    ("repvgg_a2", 5, True, True),
    ("ghostnet_100", 7, True, False),
    ("dla34", 4, True, True),
    ("dpn68", 8, True, False),
    ("res2net50_26w_4s", 7, True, False),
    ("skresnet18", 4, True, True),
    ("ecaresnet26t", 4, True, True),
    ("tf_efficientnet_b0", 6, True, False),
    ("convnext_tiny", 4, True, True),
    ("mobilevit_s", 6, True, True),
    ("visformer_small", 4, False, True),
    ("volo_d1_224", 5, False, False),
    ("convit_tiny", 4, False, False),
    ("vit_small_patch16_224", 3, False, True),
    ("deit_small_distilled_patch16_224", 3, False, False),
    ("beit_base_patch16_224", 3, False, False),
    ("eva02_tiny_patch14_224", 3, False, False),
    ("swin_tiny_patch4_window7_224", 5, False, True),
    ("mixer_b16_224", 2, False, False),
    ("resmlp_12_224", 2, False, False),
    ("gmlp_s16_224", 4, False, False),
    ("cait_xxs24_224", 6, False, False),
    ("xcit_nano_12_p16_224", 5, False, False),
    ("coat_tiny", 7, False, False),
    ("crossvit_tiny_240", 6, False, False),
    ("levit_128s", 4, False, False),
    ("poolformer_s12", 3, True, False),
    ("pvt_v2_b0", 4, False, False),
    ("twins_svt_small", 5, False, False),
    ("tnt_s_patch16_224", 5, False, False),
)


def _timm(name: str) -> nn.Module:
    import timm

    return Classifier(timm.create_model(name, pretrained=False, num_classes=CLASSES))


def _timm_inputs(name: str, draw: Draw, batch: int, train: bool) -> Inputs:
    import timm

    config = timm.get_pretrained_cfg(name)
    assert config is not None, f"timm knows no {name}"
    return _images(tuple(config.input_size[1:]), draw, batch, train)


def _images(pixels: tuple[int, ...], draw: Draw, batch: int, train: bool) -> Inputs:
    return (draw.normal(batch, 3, *pixels), *([draw.integers(0, CLASSES, batch)] if train else []))


class Segmenter(nn.Module):
    """A network that gives ``{"out": logits (batch, classes, height, width)}``, with its cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        outputs = self.model(x)
        return floats(outputs) if target is None else F.cross_entropy(outputs["out"].float(), target)


class Flow(nn.Module):
    """Optical flow: two images to a flow (batch, 2, height, width) after each refinement."""

    def __init__(self, model: nn.Module, updates: int) -> None:
        super().__init__()
        self.model, self.updates = model, updates

    def forward(self, a: Tensor, b: Tensor, target: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        flows = self.model(a, b, num_flow_updates=self.updates)
        if target is None:
            return tuple(flows)
        return sum((flow.float() - target).abs().mean() for flow in flows)


class Detector(nn.Module):
    """A detection model's backbone and heads: logits and boxes of every anchor.

    What follows them in inference (decoding, suppression) has sizes that depend on the data.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, x: Tensor, classes: Tensor | None = None, boxes: Tensor | None = None) -> Any:
        found = self.head(list(self.backbone(x).values()))
        if classes is None or boxes is None:
            return floats(found)
        logits = found["cls_logits"].float().flatten(0, 1)
        return F.cross_entropy(logits, classes) + F.smooth_l1_loss(found["bbox_regression"].float(), boxes)


def _tv(kind: Callable[[nn.Module], nn.Module], path: str, **arguments: Any) -> nn.Module:
    import torchvision

    place: Any = torchvision.models
    for name in path.split("."):
        place = getattr(place, name)
    return kind(place(weights=None, **arguments))


def _segments(draw: Draw, batch: int, train: bool) -> Inputs:
    return (draw.normal(batch, 3, 224, 224), *([draw.integers(0, 21, batch, 224, 224)] if train else []))


def _pairs(draw: Draw, batch: int, train: bool) -> Inputs:
    pair = (draw.normal(batch, 3, 128, 128), draw.normal(batch, 3, 128, 128))
    return (*pair, draw.normal(batch, 2, 128, 128)) if train else pair


def _detections(pixels: int, anchors: int, draw: Draw, batch: int, train: bool) -> Inputs:
    x = draw.normal(batch, 3, pixels, pixels)
    if not train:
        return (x,)
    return x, draw.integers(0, 91, batch * anchors), draw.normal(batch, anchors, 4)


def _classifier(name: str, cost: float, timed: bool = False, **arguments: Any) -> Entry:
    program = partial(_tv, Classifier, name, **arguments)
    conv = not name.startswith(("swin", "maxvit"))
    return Entry(
        f"tv/{name}", program, partial(_images, (224, 224)), batch=16, conv=conv, timed=timed, cost=cost
    )


# 9 anchors at each place of the five levels of a 256-pixel image; six at each of SSD's six maps at 320.
_RETINA_ANCHORS = 9 * sum(side**2 for side in (32, 16, 8, 4, 2))
_SSD_ANCHORS = 6 * sum(side**2 for side in (20, 10, 5, 3, 2, 1))

_plain = {"weights_backbone": None}
ENTRIES = (
    *(
        Entry(
            *(f"timm/{name}", partial(_timm, name), partial(_timm_inputs, name)),
            batch=16,
            conv=conv,
            timed=timed,
            cost=cost,
        )
        for name, cost, conv, timed in _TIMM
    ),
    _classifier("resnet18", 2, timed=True),
    _classifier("vgg11_bn", 2),
    _classifier("squeezenet1_1", 2),
    _classifier("shufflenet_v2_x1_0", 5, timed=True),
    _classifier("mnasnet1_0", 5),
    _classifier("googlenet", 5, aux_logits=False, init_weights=False),
    _classifier("maxvit_t", 9),
    _classifier("swin_v2_t", 7),
    Entry(
        "tv/deeplabv3_resnet50",
        partial(_tv, Segmenter, "segmentation.deeplabv3_resnet50", **_plain),
        *(_segments, 8, True),
        timed=True,
        cost=5,
    ),
    Entry(
        "tv/lraspp_mobilenet_v3_large",
        partial(_tv, Segmenter, "segmentation.lraspp_mobilenet_v3_large", **_plain),
        *(_segments, 8, True),
        cost=6,
    ),
    Entry(
        "tv/raft_small",
        partial(_tv, partial(Flow, updates=3), "optical_flow.raft_small"),
        *(_pairs, 4, True),
        timed=True,
        cost=5,
    ),
    Entry(
        "tv/retinanet_resnet50_fpn",
        partial(_tv, Detector, "detection.retinanet_resnet50_fpn", **_plain),
        *(partial(_detections, 256, _RETINA_ANCHORS), 4, True),
        cost=7,
    ),
    Entry(
        "tv/ssdlite320_mobilenet_v3_large",
        partial(_tv, Detector, "detection.ssdlite320_mobilenet_v3_large", **_plain),
        *(partial(_detections, 320, _SSD_ANCHORS), 8, True),
        cost=8,
    ),
)
