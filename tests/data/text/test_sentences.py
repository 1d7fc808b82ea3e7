from jaxtrain.data.text import sentences


def test_sentences() -> None:
    text = (
        'Mr. Bennet met Dr. J. Doe at 3.15 p.m. in town! "Why?" he said. He left...\n'
        "A line\nthat goes on\n \n= A title =\n\nThe end. (Really.) 「終わり。」はい。"
    )
    assert sentences.cut(text) == [
        "Mr. Bennet met Dr. J. Doe at 3.15 p.m. in town!",
        '"Why?" he said.',
        "He left...",
        "A line\nthat goes on",
        "= A title =",
        "The end.",
        "(Really.)",
        "「終わり。」",
        "はい。",
    ]
    assert sentences.cut(" \n") == []
