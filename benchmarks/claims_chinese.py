"""The tables of the claims page in Chinese: their cells, translated phrase by phrase."""

from __future__ import annotations

import re

_PHRASES = {
    "GPT-2 of 4 layers on this CPU, measured: compiled": "本机 CPU 上 4 层 GPT-2，实测：torch.compile",
    "UNet of 32 channels, RTX 3090: bf16 for fp32": "32 通道 UNet，RTX 3090：fp32 改为 bf16",
    "bf16 for fp32": "fp32 改为 bf16",
    "flash for math attention": "math 注意力改为 flash",
    "every block checkpointed": "每个块都做检查点",
    "every layer checkpointed": "每层都做检查点",
    "each checkpointed": "逐个做检查点",
    "two groups of two": "两组，每组两个",
    "8 groups of 8": "8 组，每组 8 个",
    "√N groups": "√N 组",
    "BERT of 4 layers, 256 wide, 4 × 256 tokens": "4 层 BERT，宽 256，4 × 256 token",
    "longest tried that fits": "试过的、放得下的最长序列",
    "saved by the last pass": "最后一次前向节省",
    "steps in the same time": "同样时间内的步数",
    "activations saved": "激活节省",
    "further passes": "额外前向次数",
    "in each member": "每个成员中的算子",
    "top-1, published": "top-1（论文数值）",
    "fits, in turn": "是否放得下（依次）",
    "time, checkpointed": "时间，检查点",
    "time, lean": "时间，精简归一化",
    "peak, predicted": "峰值，预测",
    "peak, measured": "峰值，实测",
    "peak, batch 32": "峰值，batch 32",
    "peak saved": "峰值节省",
    "lean norms": "精简归一化",
    "checkpointed": "检查点",
    "math attention": "math 注意力",
    "flash attention": "flash 注意力",
    "each GPU": "每块 GPU",
    "over 8": "8 卡",
    "step at ": "单步时间，长度 ",
    "an autograd function of one's own": "自定义 autograd 函数",
    "straight through": "直通估计",
    "as an index": "用作下标",
    "as a router": "用作路由",
    "bitwise equal": "逐位相等",
    "and back": "再转回",
    " and ": " 与 ",
    "drawn": "随机抽样",
    "gradients": "梯度",
    "differ": "不同",
    "channels": "通道",
    "pixels": "像素",
    "tokens": "token",
    "wide": "宽",
    "Transformer blocks": "Transformer 块",
    "linear layers": "线性层",
    "activations": "激活",
    "attention": "注意力",
    "exponent": "指数",
    "reserved": "保留显存",
    "perhaps": "可能",
    "kernel": "内核",
    "chain": "链",
    "layers": "层",
    "blocks": "块",
    "plain": "不改动",
    "mixed": "混合精度",
    "saved": "节省",
    "state": "状态",
    "peak": "峰值",
    "time": "时间",
    "step": "单步时间",
    "fits": "放得下",
    "each": "逐个",
    "net": "网络",
    "yes": "是",
    "no": "否",
    "to": "至",
}
"""Phrases of cells, the longer ones first where one holds another."""


_ORDER = {
    r"(?<=\d) (?=(线性层|块))": " 个",
    r"(?<=\d) (?=Transformer 块)": " 个 ",
    r"(\d+) 宽": r"宽 \1",
    r"(\d) token": r"\1 个 token",
    r", (?=\S)": "，",
}
"""What is put in another order, or counted, in Chinese."""


def translated(text: str) -> str:
    """Return a table, or a short text, with its words in Chinese."""
    # What stands between backticks is code: every second part.
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if index % 2 else _words(part) for index, part in enumerate(parts))


def _words(text: str) -> str:
    for phrase, chinese in _PHRASES.items():
        text = re.sub(rf"(?<![A-Za-z]){re.escape(phrase)}(?![A-Za-z])", chinese, text)
    text = text.replace("this CPU: ", "本机 CPU：").replace("额外前向次数: ", "额外前向次数：")
    for order, chinese in _ORDER.items():
        text = re.sub(order, chinese, text)
    return text
