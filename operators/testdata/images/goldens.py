"""Images of the tests and what Pillow makes of them: `python goldens.py` (Pillow 11.3, numpy; from 13.0 on Pillow goes down before across where an image
grows wider and less high) writes this folder anew.

`golden.json` names what is in `golden.bin.gz`: one array of bytes after the other.
"""

import gzip
import io
import json
import pathlib
import zlib

import numpy as np
from PIL import Image, ImageOps

HERE = pathlib.Path(__file__).parent
FILTERS = {"box": Image.BOX, "bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC, "lanczos": Image.LANCZOS}


def picture(width: int, height: int, channels: int) -> np.ndarray:
    """A gradient, a wave and noise: edges that overshoot, and no two rows alike."""
    rng = np.random.default_rng(7)
    y, x = np.mgrid[0:height, 0:width]
    planes = [x * 255 / width, y * 255 / height, 127 + 127 * np.sin(x * y / 40)]
    noise = rng.integers(-60, 60, (height, width, channels))
    return np.clip(np.stack(planes[:channels], -1) + noise, 0, 255).astype(np.uint8)


def torchvision(image: Image.Image, size: int, resample: int) -> Image.Image:
    """`Resize(size)` and `CenterCrop(size)` of torchvision, over Pillow."""
    w, h = image.size
    short, long = (w, h) if w <= h else (h, w)
    new_short, new_long = size, int(size * long / short)
    new_w, new_h = (new_short, new_long) if w <= h else (new_long, new_short)
    image = image if (new_w, new_h) == (w, h) else image.resize((new_w, new_h), resample)
    top, left = int(round((new_h - size) / 2.0)), int(round((new_w - size) / 2.0))
    return image.crop((left, top, left + size, top + size))


def adm(image: Image.Image, size: int, resample: int) -> Image.Image:
    """`center_crop_arr` of guided-diffusion."""
    while min(*image.size) >= 2 * size:
        image = image.resize(tuple(x // 2 for x in image.size), resample=Image.BOX)
    scale = size / min(*image.size)
    image = image.resize(tuple(round(x * scale) for x in image.size), resample=resample)
    arr = np.array(image)
    top, left = (arr.shape[0] - size) // 2, (arr.shape[1] - size) // 2
    return Image.fromarray(arr[top : top + size, left : left + size])


def main() -> None:
    entries, blob = [], b""

    def add(entry: dict, values: np.ndarray) -> None:
        nonlocal blob
        entries.append({**entry, "shape": list(values.shape)})
        blob += values.tobytes()

    rgb, grey = picture(75, 53, 3), picture(40, 61, 1)[..., 0]
    for name, array in {"rgb": rgb, "grey": grey}.items():
        Image.fromarray(array).save(HERE / f"{name}.png")
        image = Image.fromarray(array)
        add({"file": f"{name}.png", "fit": "exact"}, array)
        for filter, resample in FILTERS.items():
            for size in [1, 8, 31]:
                add({"file": f"{name}.png", "fit": "stretch", "filter": filter, "size": size}, np.array(image.resize((size, size), resample)))
                add({"file": f"{name}.png", "fit": "center_crop", "filter": filter, "size": size}, np.array(torchvision(image, size, resample)))
                add({"file": f"{name}.png", "fit": "adm", "filter": filter, "size": size}, np.array(adm(image, size, resample)))
            add({"file": f"{name}.png", "fit": "stretch", "filter": filter, "size": 90, "height": 20}, np.array(image.resize((90, 20), resample)))
    add({"file": "rgb.png", "fit": "exact", "channels": "grey"}, np.array(Image.fromarray(rgb).convert("L")))

    # what else a PNG may be: a palette, few bits, alpha, two channels
    small = Image.fromarray(rgb[:11, :13])
    small.quantize(16).save(HERE / "palette.png")
    add({"file": "palette.png", "fit": "exact"}, np.array(small.quantize(16).convert("RGB")))
    bits = Image.fromarray((grey[:9, :10] > 127).astype(np.uint8) * 255).convert("1")
    bits.save(HERE / "bits.png")
    add({"file": "bits.png", "fit": "exact"}, np.array(bits.convert("RGB")))
    opaque = small.convert("RGBA")
    opaque.save(HERE / "opaque.png")
    add({"file": "opaque.png", "fit": "exact"}, np.array(small))
    seen = np.array(opaque)
    seen[..., 3] = np.arange(seen.size // 4).reshape(seen.shape[:2]) % 256
    Image.fromarray(seen).save(HERE / "alpha.png")
    a, v = seen[..., 3:].astype(np.uint32), seen[..., :3].astype(np.uint32)
    add({"file": "alpha.png", "fit": "exact", "background": "black"}, ((a * v + 127) // 255).astype(np.uint8))
    add({"file": "alpha.png", "fit": "exact", "background": "white"}, ((a * v + (255 - a) * 255 + 127) // 255).astype(np.uint8))

    # JPEG: decoders differ by a few levels, so these are compared with a bound
    smooth = Image.fromarray(rgb).resize((40, 24), Image.BOX).resize((64, 48), Image.BICUBIC)
    for name, options in {
        "444.jpg": {"subsampling": 0, "quality": 95},
        "420.jpg": {"subsampling": 2, "quality": 90},
        "progressive.jpg": {"progressive": True, "quality": 90, "subsampling": 0},
    }.items():
        smooth.save(HERE / name, **options)
        add({"file": name, "fit": "exact"}, np.array(Image.open(HERE / name).convert("RGB")))
    smooth.convert("L").save(HERE / "grey.jpg", quality=95)
    add({"file": "grey.jpg", "fit": "exact"}, np.array(Image.open(HERE / "grey.jpg").convert("RGB")))
    # for cutting: restart markers, and scans of half-sized chroma and of one component; 61×45 fills no unit
    odd = smooth.crop((0, 0, 61, 45))
    odd.save(HERE / "restarts.jpg", subsampling=2, quality=90, restart_marker_blocks=3)
    odd.save(HERE / "420-progressive.jpg", progressive=True, subsampling=2, quality=85, restart_marker_rows=2)
    odd.convert("L").save(HERE / "grey-progressive.jpg", progressive=True, quality=85)

    # lying on its side, in each of the eight ways
    tiny = Image.fromarray(rgb[:6, :4])
    for way in range(1, 9):
        exif = Image.Exif()
        exif[274] = way
        for ending in ["png"]:
            tiny.save(HERE / f"exif{way}.{ending}", exif=exif)
            turned = ImageOps.exif_transpose(Image.open(HERE / f"exif{way}.{ending}"))
            add({"file": f"exif{way}.{ending}", "fit": "exact"}, np.array(turned))
    exif = Image.Exif()
    exif[274] = 6
    smooth.save(HERE / "exif6.jpg", exif=exif, quality=95, subsampling=0)
    add({"file": "exif6.jpg", "fit": "exact"}, np.array(ImageOps.exif_transpose(Image.open(HERE / "exif6.jpg"))))

    # hostile
    small.convert("CMYK").save(HERE / "cmyk.jpg")
    Image.fromarray(grey.astype(np.uint16)[:6, :5] * 257).save(HERE / "sixteen.png")
    small.save(HERE / "animated.png", save_all=True, append_images=[small.rotate(90)])
    small.save(HERE / "image.gif")
    small.save(HERE / "image.webp", lossless=True)
    small.save(HERE / "image.bmp")
    small.save(HERE / "profile.png", icc_profile=b"this is no profile" * 10)
    add({"file": "profile.png", "fit": "exact"}, np.array(small))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    # 60,000 × 60,000 pixels in a few bytes
    bomb = io.BytesIO(b"")
    bomb.write(b"\x89PNG\r\n\x1a\n")
    bomb.write(chunk(b"IHDR", (60000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])))
    bomb.write(chunk(b"IDAT", zlib.compress(bytes(1 << 20), 9)) + chunk(b"IEND", b""))
    (HERE / "bomb.png").write_bytes(bomb.getvalue())
    nothing = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes(8) + bytes([8, 2, 0, 0, 0])) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (HERE / "nothing.png").write_bytes(nothing)

    with (HERE / "golden.bin.gz").open("wb") as file:
        file.write(gzip.compress(blob, mtime=0))
    (HERE / "golden.json").write_text(json.dumps(entries))


main()
