//! `input.images` and `input.codes`: the layout of images, and their conversion into rows of numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Number of values of a pixel's channel: C for images.
pub const PIXEL_VALUES: u32 = 256;

/// For `format: images`: where images lie, and what is made of each: `height · width · channels` numbers below 256, channel last, row by row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Images {
    /// What the files are.
    #[serde(default)]
    pub layout: Layout,
    /// Width of a row's image in pixels, and its height where `height` says nothing else.
    #[schemars(range(min = 1, max = 4096))]
    pub size: u32,
    /// Height in pixels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub height: Option<u32>,
    /// Colours of a row.
    #[serde(default)]
    pub channels: Channels,
    /// How an image of another size comes to `size`.
    #[serde(default)]
    pub fit: Fit,
    /// What resizing weighs pixels by; of `fit: adm` the halvings are always `box`.
    #[serde(default)]
    pub filter: Filter,
    /// What an image with transparent pixels is laid on. Default: it is a bad record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub background: Option<Background>,
    /// Whether an image that says by EXIF that it lies on its side is turned.
    #[serde(default)]
    pub orientation: Orientation,
    /// What is made of colour profiles.
    #[serde(default, skip_serializing_if = "Profile::is_ignored")]
    pub profile: Profile,
    /// Where labels are. Default: `folder` for `files`, `cls` for `tar`, `stored` otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<ImageLabels>,
    /// For `labels: folder`: the names of the folders, the first has label 0. Default for `files`: all folders that hold an image, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1_000_000))]
    pub classes: Vec<String>,
    /// For `labels: json`: the key that holds the label, a whole number.
    #[serde(default = "default_key", skip_serializing_if = "is_default_key")]
    pub label_key: String,
    /// Largest image in pixels, before anything of its size is allocated: memory is some eight bytes for each, per reader.
    #[serde(default = "default_pixels")]
    #[schemars(range(min = 1, max = 268_435_456))]
    pub max_pixels: u32,
}

/// What the files of images are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// A PNG or JPEG each.
    #[default]
    Files,
    /// Tar files (plain, gzip or zstd) of PNG and JPEG; WebDataset's, where the members of a sample share a name up to its first dot.
    Tar,
    /// CIFAR-10, the Python version: `data_batch_1`, …
    Cifar10Python,
    /// CIFAR-10, the binary version: `data_batch_1.bin`, …
    Cifar10Binary,
    /// CIFAR-100, the Python version: `train`; the label is the fine one.
    Cifar100Python,
    /// CIFAR-100, the binary version: `train.bin`; the label is the fine one.
    Cifar100Binary,
    /// IDX, as MNIST: files of images, and of labels beside them (`…labels-idx1…` for `…images-idx3…`), which `paths` has to name too.
    Idx,
}

/// Colours of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Channels {
    /// Red, green, blue; grey is all three alike.
    #[default]
    Rgb,
    /// One: (19595 R + 38470 G + 7471 B + 2^15) / 2^16, as Pillow's `L`.
    Grey,
}

impl Channels {
    /// Number of channels.
    pub fn count(self) -> usize {
        match self {
            Self::Rgb => 3,
            Self::Grey => 1,
        }
    }
}

/// How an image of another size comes to the size of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// It does not: it is a bad record.
    #[default]
    Exact,
    /// Resized, whatever its shape (downsampled ImageNet).
    Stretch,
    /// The shorter side resized, the middle cut out: torchvision's `Resize` and `CenterCrop`.
    CenterCrop,
    /// ADM's `center_crop_arr`: halved while the shorter side is twice `size` or more, then resized, the middle cut out.
    Adm,
}

/// What resizing weighs pixels by: Pillow's filters, in its integer arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Filter {
    /// All alike.
    Box,
    /// A triangle.
    Bilinear,
    /// A cubic, a = −0.5.
    #[default]
    Bicubic,
    /// Lanczos of three lobes.
    Lanczos,
}

/// What transparent pixels are laid on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Background {
    /// 0.
    Black,
    /// 255.
    White,
}

/// What EXIF's orientation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Orientation {
    /// The image is turned as it says.
    #[default]
    Apply,
    /// Nothing, as in torchvision's `ImageFolder`.
    Ignore,
}

/// What is made of the ICC profile of an image. Numbers are never converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Profile {
    /// Nothing, as in Pillow's `convert` and so in torchvision and the papers' code: numbers are taken as they are stored.
    #[default]
    Ignore,
    /// An image whose profile is damaged, of other colours than the image, or not sRGB's (primaries, curves; of grey the curve) is a bad record.
    Srgb,
}

impl Profile {
    fn is_ignored(&self) -> bool {
        *self == Self::Ignore
    }
}

/// Where the labels of images are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageLabels {
    /// There are none.
    None,
    /// The folder that an image lies in is its class; the label is the class's place in `classes`.
    Folder,
    /// The member `.cls` beside an image of a tar: a whole number.
    Cls,
    /// The member `.json` beside an image of a tar, at `label_key`.
    Json,
    /// In the files, as CIFAR and IDX have them.
    Stored,
}

impl Images {
    /// Height and width of the images in rows.
    pub fn height_width(&self) -> (usize, usize) {
        (self.height.unwrap_or(self.size) as usize, self.size as usize)
    }

    /// Numbers per row.
    pub fn length(&self) -> u64 {
        let (height, width) = self.height_width();
        height as u64 * width as u64 * self.channels.count() as u64
    }

    /// Location of the labels: as configured, or the default of the layout.
    pub fn labels(&self) -> ImageLabels {
        self.labels.unwrap_or(match self.layout {
            Layout::Files => ImageLabels::Folder,
            Layout::Tar => ImageLabels::Cls,
            _ => ImageLabels::Stored,
        })
    }
}

/// For `format: codes`: rows of whole numbers, such as the codes of a VQGAN, from `.npy` or Parquet files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Codes {
    /// How many codes there are, C: every code is below it.
    #[schemars(range(min = 2, max = 262_144))]
    pub size: u32,
    /// Codes of an image, which is `pack.length`.
    #[schemars(range(min = 2, max = 1_048_576))]
    pub length: u32,
    /// Of Parquet: the column of lists that holds the codes.
    #[serde(default = "default_column", skip_serializing_if = "is_default_column")]
    pub column: String,
    /// Where labels are. Of Parquet: the column of whole numbers. Of `.npy`: the ending of the file beside that holds them, `_labels` for
    /// `train_labels.npy` beside `train.npy`, which `paths` has to name too. Default: no labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<String>,
}

fn default_key() -> String {
    "label".into()
}
fn is_default_key(key: &String) -> bool {
    *key == default_key()
}
fn default_column() -> String {
    "codes".into()
}
fn is_default_column(column: &String) -> bool {
    *column == default_column()
}
fn default_pixels() -> u32 {
    1 << 25
}
