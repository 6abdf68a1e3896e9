//! `input.images` and `input.codes`: the layout of images, and their conversion into rows of numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Number of values of a pixel's channel: C for images.
pub const PIXEL_VALUES: u32 = 256;

/// For `format: images`: the layout of the files, and how an image becomes a row of `height · width · channels` numbers below 256, channel last, row by row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Images {
    /// Layout of the files.
    #[serde(default)]
    pub layout: Layout,
    /// Width of a row's image in pixels; also its height, unless `height` is set.
    #[schemars(range(min = 1, max = 4096))]
    pub size: u32,
    /// Height in pixels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub height: Option<u32>,
    /// Colours of a row.
    #[serde(default)]
    pub channels: Channels,
    /// How an image of another size becomes one of `size`.
    #[serde(default)]
    pub fit: Fit,
    /// Filter for resizing. The halvings of `fit: adm` always use `box`.
    #[serde(default)]
    pub filter: Filter,
    /// Background for transparent pixels. Default: an image with transparent pixels is a bad record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub background: Option<Background>,
    /// Whether an image is rotated as its EXIF orientation says.
    #[serde(default)]
    pub orientation: Orientation,
    /// How colour profiles are handled.
    #[serde(default, skip_serializing_if = "Profile::is_ignored")]
    pub profile: Profile,
    /// Where the labels are. Default: `folder` for `files`, `cls` for `tar`, `stored` otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<ImageLabels>,
    /// For `labels: folder`: the names of the folders; the first has label 0. Default for `files`: all folders that contain an image, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1_000_000))]
    pub classes: Vec<String>,
    /// For `labels: json`: the key that holds the label, a whole number.
    #[serde(default = "default_key", skip_serializing_if = "is_default_key")]
    pub label_key: String,
    /// Largest image in pixels. It is checked before memory of its size is allocated: about eight bytes per pixel and reader.
    #[serde(default = "default_pixels")]
    #[schemars(range(min = 1, max = 268_435_456))]
    pub max_pixels: u32,
}

/// Layout of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// One PNG or JPEG per file.
    #[default]
    Files,
    /// Tar files (plain, gzip or zstd) of PNG and JPEG. As in WebDataset, the members of a sample have the same name up to its first dot.
    Tar,
    /// CIFAR-10, the Python version: `data_batch_1`, …
    Cifar10Python,
    /// CIFAR-10, the binary version: `data_batch_1.bin`, …
    Cifar10Binary,
    /// CIFAR-100, the Python version: `train`; the label is the fine one.
    Cifar100Python,
    /// CIFAR-100, the binary version: `train.bin`; the label is the fine one.
    Cifar100Binary,
    /// IDX, as MNIST: files of images with files of labels (`…labels-idx1…` for `…images-idx3…`). `paths` must include both.
    Idx,
}

/// Colours of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Channels {
    /// Red, green, blue; a grey image has three equal channels.
    #[default]
    Rgb,
    /// One channel: (19595 R + 38470 G + 7471 B + 2^15) / 2^16, as Pillow's `L`.
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

/// How an image of another size becomes one of the size of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// It is a bad record.
    #[default]
    Exact,
    /// Resized to the size, whatever its shape (downsampled ImageNet).
    Stretch,
    /// The shorter side is resized and the centre cropped, as torchvision's `Resize` and `CenterCrop` do.
    CenterCrop,
    /// As ADM's `center_crop_arr`: halved while the shorter side is at least twice `size`, then resized and cropped to the centre.
    Adm,
}

/// Filters for resizing: Pillow's, in its integer arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Filter {
    /// Equal weights.
    Box,
    /// A triangle (bilinear).
    Bilinear,
    /// A cubic with a = −0.5 (bicubic).
    #[default]
    Bicubic,
    /// Lanczos with three lobes.
    Lanczos,
}

/// Background for transparent pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Background {
    /// 0.
    Black,
    /// 255.
    White,
}

/// How EXIF's orientation is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Orientation {
    /// The image is rotated accordingly.
    #[default]
    Apply,
    /// It is ignored, as in torchvision's `ImageFolder`.
    Ignore,
}

/// How the ICC profile of an image is handled. Pixel values are never converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Profile {
    /// It is ignored, as in Pillow's `convert` and so in torchvision and the papers' code.
    #[default]
    Ignore,
    /// An image is a bad record if its profile is damaged, is for other colours than the image, or is not sRGB (primaries, curves; for grey the curve).
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
    /// No labels.
    None,
    /// The folder of an image is its class; the label is the index of the class in `classes`.
    Folder,
    /// In the member `.cls` of the sample in a tar: a whole number.
    Cls,
    /// In the member `.json` of the sample in a tar, at `label_key`.
    Json,
    /// In the files, as in CIFAR and IDX.
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
    /// Number of codes, C. Every code is below C.
    #[schemars(range(min = 2, max = 262_144))]
    pub size: u32,
    /// Number of codes of an image; it equals `pack.length`.
    #[schemars(range(min = 2, max = 1_048_576))]
    pub length: u32,
    /// For Parquet: the column of lists with the codes.
    #[serde(default = "default_column", skip_serializing_if = "is_default_column")]
    pub column: String,
    /// Where labels are. For Parquet: the column of whole numbers. For `.npy`: the ending of the file of labels, such as `_labels` for
    /// `train_labels.npy` beside `train.npy`; `paths` must include it too. Default: no labels.
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
