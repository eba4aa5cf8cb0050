"""What the site's build is told beside `mkdocs.yml`.

In the search, what to do comes before how it works; pages that exist only once something was measured are listed; and
pages of `zh/` are in Chinese, each with a link to its English counterpart and back.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BOOSTS = {"guides": 4.0, "internals": 0.5, "reference": 0.5, "results": 0.5}
"""For each folder, how much its pages count in the search; all others count 1."""

MEASURED = {"Results": ["results/gpu.md"], "中文": ["zh/results/claims.md"]}
"""For each part of the navigation, the pages that results make, where there are such results."""

CHINESE = "zh/"
"""The folder of pages in Chinese, which has the same paths as the docs."""

_CHINESE_BREAK = re.compile(
    r"(?<=[\u4e00-\u9fff，。、：；！？）”])\n *(?=\**\[?[\u4e00-\u9fff（“])|(?<=[，。、：；！？）])\n *(?=[A-Za-z`])"
)
"""A line's end inside Chinese text, which browsers would show as a space."""


WORDS = """
显存 内存 显卡 不足 放得下 放不下 训练 脚本 模型 参数 梯度 累积 裁剪 检查点 检查 激活 优化器 优化 状态 峰值 预算 方案
手段 等级 数值 精度 混合 位数 逐位 相等 重计算 重算 计算 微批次 批次 归一化 注意力 融合 编译 算子 张量 矩阵 模块 序列
长度 图像 像素 通道 卷积 网络 残差 线性 缩放 损失 误差 预测 实测 测量 测试 验证 节省 保留 时间 速度 最快 快速 上手
安装 命令 选项 退出码 报错 错误 异常 容器 限制 上限 局限 进程 程序 主机 设备 机器 断点 续训 恢复 崩溃 继续 保存 日志
学习率 调度 循环 前向 反向 传播 更新 样本 平均 原理 结论 说法 常见 成立 计图 随机数 随机 分配器 缓冲区 缓存 碎片 驱动
磁盘 换出 段错误 数学 顺序 求和 结构 深度 层数 平方 指数 怎么 怎样 如何 多少 什么 没有 不能 可以 支持 使用 运行 环境
回调 文件 输出 输入 数据 增长 更大 更小 最低 最大 权衡 曲线 搜索 选择 规划 观察 默认 字节 百分比 倍数 解决 俗称
"""
"""Words of the pages in Chinese. The search finds them whole, and any other character by itself."""

_WORD = re.compile("|".join([*sorted(WORDS.split(), key=len, reverse=True), "[\u4e00-\u9fff]"]))


def on_config(config: Any, **_: Any) -> Any:
    """List the pages that exist by results."""
    for section in config["nav"]:
        for title, pages in section.items():
            known = [page for page in MEASURED.get(title, ()) if Path(config["docs_dir"], page).exists()]
            pages += [page for page in known if page not in pages]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set a page's rank, as the front matter `search.boost` would, which hosts of repositories show as a table.

    Of Chinese pages, lines are joined.
    """
    path = page.file.src_uri.removeprefix(CHINESE)
    page.meta["search"] = {"boost": BOOSTS.get(path.partition("/")[0], 1.0)}
    return markdown if path == page.file.src_uri else _CHINESE_BREAK.sub("", markdown)


def on_page_context(context: Any, page: Any, config: Any, **_: Any) -> Any:
    """Set a page's language, and the pages that the switch of languages leads to."""
    path = page.file.src_uri.removeprefix(CHINESE)
    config["theme"]["language"] = "en" if path == page.file.src_uri else "zh"
    existing = {file.src_uri: file.url for file in context["pages"]}
    for language, home in zip(config["extra"]["alternate"], ("", CHINESE), strict=True):
        language["link"] = existing.get(f"{home}{path}", existing[f"{home}index.md"])
    return context


def with_words_apart(text: str) -> str:
    """Return a text with a space without width around each Chinese word, as Material would with the package jieba.

    Material separates the words of a query by those of the index.
    """
    return _WORD.sub("\u200b\\g<0>\u200b", text)


def on_post_build(config: Any, **_: Any) -> None:
    """Separate the Chinese words of the search's index."""
    file = Path(config["site_dir"], "search", "search_index.json")
    index = json.loads(file.read_text())
    for section in index["docs"]:
        section |= {key: with_words_apart(section[key]) for key in ("title", "text")}
    file.write_text(json.dumps(index, separators=(",", ":")))
