"""Attacks on value trees."""

from __future__ import annotations

import base64

from specs.kit.attack import value


def trees() -> None:
    value("values.tag", "an unknown tag", '{"$later":1}')
    value("values.tag", "a dollar alone", '{"$":1}')
    value("values.alone", "a tag with a member beside it", '{"$tuple":[],"x":1}')
    value("values.alone", "two tags", '{"$tuple":[],"$set":[]}')
    value("values.alone", "a member that looks like a tag, behind another", '{"x":1,"$tuple":[]}')
    odd = base64.b64encode(b"\x80").decode()
    for wrong in [
        '{"$tuple":{}}', '{"$tuple":"ab"}', '{"$dict":{}}', '{"$dict":[[1]]}', '{"$dict":[[1,2,3]]}', '{"$dict":["ab"]}', '{"$ordered":[{}]}',
        '{"$set":{}}', '{"$set":"ab"}', '{"$frozenset":1}', '{"$int":5}', '{"$int":"5"}', '{"$int":"0x"}', '{"$int":"0x_1"}', '{"$int":"+0x1"}',
        '{"$int":" 0x1"}', '{"$float":"NaN"}', '{"$float":"1.5"}', '{"$float":1.5}', '{"$complex":[1,2]}', '{"$complex":[1.0]}',
        '{"$complex":[1.0,2.0,3.0]}', '{"$complex":"1+2j"}', '{"$bytes":"A"}', '{"$bytes":"AA"}', '{"$bytes":"A-_="}', '{"$bytes":[65]}',
        '{"$bytes":"AAH/\\n"}', f'{{"$str":"{odd}"}}', '{"$str":1}', '{"$numpy":["float32","AACA"]}', '{"$numpy":["float32"]}',
        '{"$numpy":["object","AACAPw=="]}', '{"$numpy":["str","AACAPw=="]}', '{"$numpy":[1,"AACAPw=="]}', '{"$size":[1.5]}', '{"$size":[true]}',
        '{"$size":3}', '{"$dtype":7}', '{"$dtype":"os.system"}', '{"$device":0}', '{"$device":"cuda:x"}', '{"$path":["Path","a"]}', '{"$path":"a"}',
        '{"$path":["PosixPath"]}', '{"$path":["PosixPath",1]}', '{"$namespace":[]}', '{"$namespace":{"$tuple":[]}}', '{"$tensor":["a"]}',
        '{"$tensor":null}', '{"$array":1}', '{"$rank_local":[]}', '{"$rank_local":{"policy":"error","coords":[null]}}',
        '{"$rank_local":{"policy":"error","coords":[],"values":[1]}}', '{"$rank_local":{"policy":1,"coords":[],"values":[]}}',
        '{"$rank_local":{"policy":"error","coords":[{"dp":"0"}],"values":[1]}}', '{"$rank_local":{"policy":"e","coords":[1],"values":[1]}}',
        '{"$rank_local":{"policy":"e","coords":[],"values":[],"first":"0"}}', '{"$rank_local":{"policy":"e","coords":[],"values":[],"x":0}}',
        '{"$opaque":"a.B"}', '{"$opaque":{"class":"a.B"}}', '{"$opaque":{"class":1,"state":2}}', '{"$opaque":{"class":"a","state":1,"x":2}}',
        '{"$dict":[[[],1]]}', '{"$dict":[[{},1]]}', '{"$set":[[]]}', '{"$set":[{"$set":[]}]}', '{"$frozenset":[{"$tuple":[[]]}]}',
        '{"$dict":[[{"$dict":[]},1]]}', '{"$set":[{"$namespace":{}}]}', '{"$set":[{"$ordered":[]}]}',
    ]:  # fmt: skip
        value("values.type", wrong, wrong)
    value("values.twice", "a key twice in an object", '{"a":1,"a":1}')
    value("values.twice", "a key twice, once escaped", '{"a":1,"\\u0061":1}')
    value("values.twice", "a tag twice", '{"$tuple":[],"$tuple":[]}')
    for twin in (
        '["a",1],["a",2]',
        "[1,0],[1.0,0]",
        "[true,0],[1,0]",
        "[0.0,0],[-0.0,0]",
        '[{"$tuple":[1]},0],[{"$tuple":[1.0]},0]',
        '[{"$int":"0x1"},0],[1,0]',
    ):
        value("values.twice", f"pairs with one key: {twin}", f'{{"$dict":[{twin}]}}')
    value("values.twice", "an ordered pair twice", '{"$ordered":[["a",1],["a",1]]}')
    for twin in (
        '"a","a"',
        "1,1.0",
        "false,0",
        '{"$frozenset":[1,2]},{"$frozenset":[2,1]}',
        '{"$bytes":"AA=="},{"$bytes":"AA=="}',
        "null,null",
    ):
        value("values.set", f"{twin} in a set", f'{{"$set":[{twin}]}}')
    value("values.set", "an item twice in a frozenset", '{"$frozenset":[1,1]}')
    for wrong in ("1e999", "-1e999", "9223372036854775808", "-9223372036854775809", "123456789012345678901234567890", "1" * 5000):
        value("values.range", f"the number {wrong[:30]}", wrong)
    for wrong in ("NaN", "Infinity", "-Infinity"):
        value("values.nan", wrong, wrong)
    for wrong in (
        "nan",
        "01",
        "1.",
        ".5",
        "+1",
        "0x10",
        "1e",
        "'a'",
        '"a\nb"',
        '"\\x41"',
        "[1,]",
        '{"a":1,}',
        "// x\n1",
        "True",
        "None",
        '"\t"',
    ):
        value("envelope.json", f"no JSON: {wrong!r}", wrong)
    value("values.unicode", "half a character", '"\\ud800"')
    value("values.unicode", "half a character in a key", '{"\\udc00x":1}')
    value("values.unicode", "halves in the wrong order", '"\\udc00\\ud800"')
    value("values.depth", "arrays in arrays, 20,000 deep", "[" * 20_000 + "]" * 20_000)
    value("values.depth", "objects in objects, 20,000 deep", '{"a":' * 20_000 + "1" + "}" * 20_000)
