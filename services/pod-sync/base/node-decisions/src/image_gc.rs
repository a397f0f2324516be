//! Selects images for removal (`pkg/kubelet/images: freeSpace`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Settings of image garbage collection (`pkg/kubelet/images: ImageGCPolicy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGcPolicy {
    /// `imageGCHighThresholdPercent`; 100 disables collection by disk usage.
    pub high: u8,
    /// `imageGCLowThresholdPercent`.
    pub low: u8,
    /// `imageMinimumGCAge`: images first seen more recently are kept.
    pub min_age: Duration,
    /// `imageMaximumGCAge`: images unused for longer are removed whatever the disk usage. Zero disables it.
    pub max_age: Duration,
}

/// Interval between collections (`pkg/kubelet: ImageGCPeriod`).
const PERIOD: Duration = Duration::from_secs(5 * 60);

impl ImageGcPolicy {
    /// Returns the interval until the next collection, at least `least`. Shorter than the kubelet's period if
    /// `max_age` is.
    #[must_use]
    pub fn period(&self, least: Duration) -> Duration {
        if self.max_age.is_zero() { PERIOD } else { self.max_age.clamp(least, PERIOD.max(least)) }
    }

    /// Returns whether nothing is ever collected.
    #[must_use]
    pub fn is_disabled(&self) -> bool {
        self.high >= 100 && self.max_age.is_zero()
    }
}

/// An image in the runtime's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// ID in the runtime: the digest of the image's configuration.
    pub id: String,
    /// Tags and digests.
    pub names: Vec<String>,
    /// Bytes.
    pub size: u64,
    /// The runtime must not remove it.
    pub pinned: bool,
}

/// Times at which an image was listed and used (CLOCK_BOOTTIME).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageUse {
    /// Time of the first list that had the image.
    pub first: Duration,
    /// Time of the last use; that of the first list if the image was never used.
    pub used: Duration,
}

/// Use of the node's images over time (`pkg/kubelet/images: imageRecords`).
#[derive(Debug, Clone, Default)]
pub struct ImageUsage {
    seen: BTreeMap<String, ImageUse>,
    // CLOCK_BOOTTIME of the first observation; the process does not know of earlier use.
    since: Option<Duration>,
}

/// Capacity of the file system that stores images, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FsCapacity {
    /// Size of the file system.
    pub capacity: u64,
    /// Space that unprivileged users may still use.
    pub available: u64,
}

impl ImageUsage {
    /// Records the listed images. `in_use` has image IDs and names.
    pub fn observe(&mut self, images: &[Image], in_use: &BTreeSet<String>, now: Duration) {
        self.since.get_or_insert(now);
        self.seen.retain(|id, _| images.iter().any(|i| i.id == *id));
        for image in images {
            let seen =
                self.seen.entry(image.id.clone()).or_insert(ImageUse { first: now, used: Duration::ZERO });
            if is_used(image, in_use) {
                seen.used = now;
            }
        }
    }

    /// Images not in use, the least recently used first, then the first seen first.
    fn candidates<'a>(
        &self,
        images: &'a [Image],
        in_use: &BTreeSet<String>,
        may_go: impl Fn(&ImageUse) -> bool,
    ) -> Vec<&'a Image> {
        let unused = images.iter().filter(|i| !i.pinned && !is_used(i, in_use));
        let mut out: Vec<_> = unused.filter_map(|i| Some((i, *self.seen.get(&i.id)?))).collect();
        out.retain(|(_, seen)| may_go(seen));
        out.sort_by_key(|(_, seen)| (seen.used, seen.first));
        out.into_iter().map(|(image, _)| image).collect()
    }

    /// Returns the images that were not used for `max_age` since this process began to observe them.
    #[must_use]
    pub fn unused_for_max_age<'a>(
        &self,
        images: &'a [Image],
        in_use: &BTreeSet<String>,
        policy: ImageGcPolicy,
        now: Duration,
    ) -> Vec<&'a Image> {
        let running = now.saturating_sub(self.since.unwrap_or(now));
        if policy.max_age.is_zero() || running <= policy.max_age {
            return Vec::new();
        }
        let old = |seen: &ImageUse| {
            now.saturating_sub(seen.used) > policy.max_age && now.saturating_sub(seen.first) >= policy.min_age
        };
        self.candidates(images, in_use, old)
    }

    /// Returns the images that may be removed to free space, the least recently used first.
    #[must_use]
    pub fn least_recently_used<'a>(
        &self,
        images: &'a [Image],
        in_use: &BTreeSet<String>,
        policy: ImageGcPolicy,
        now: Duration,
    ) -> Vec<&'a Image> {
        let ripe = |seen: &ImageUse| now.saturating_sub(seen.first) >= policy.min_age;
        self.candidates(images, in_use, ripe)
    }
}

fn is_used(image: &Image, in_use: &BTreeSet<String>) -> bool {
    in_use.contains(&image.id) || image.names.iter().any(|n| in_use.contains(n))
}

/// Returns the used percentage of a file system.
#[must_use]
pub fn usage_percent(disk: FsCapacity) -> u64 {
    let free = u128::from(disk.available.min(disk.capacity)).saturating_mul(100);
    // Without capacity, nothing is free.
    let percent = free.checked_div(u128::from(disk.capacity)).unwrap_or(0);
    100_u64.saturating_sub(u64::try_from(percent).unwrap_or(100))
}

/// Returns the bytes to free; `None` below the threshold.
#[must_use]
pub fn bytes_to_free(disk: FsCapacity, policy: ImageGcPolicy) -> Option<u64> {
    if policy.high >= 100 || usage_percent(disk) < u64::from(policy.high) {
        return None;
    }
    let wanted = (disk.capacity / 100).saturating_mul(u64::from(100_u8.saturating_sub(policy.low)));
    Some(wanted.saturating_sub(disk.available)).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: ImageGcPolicy =
        ImageGcPolicy { high: 85, low: 80, min_age: Duration::from_secs(120), max_age: Duration::ZERO };

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn image(id: &str) -> Image {
        Image { id: id.to_owned(), names: vec![format!("r.test/{id}:1")], size: 10, pinned: false }
    }

    fn used(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|n| (*n).to_owned()).collect()
    }

    fn ids(images: Vec<&Image>) -> Vec<&str> {
        images.into_iter().map(|i| i.id.as_str()).collect()
    }

    #[test]
    fn images_are_collected_as_often_as_a_short_maximum_age_requires() {
        for (max_age, want) in [(0, 300), (1, 5), (60, 60), (300, 300), (86_400, 300)] {
            assert_eq!(ImageGcPolicy { max_age: s(max_age), ..POLICY }.period(s(5)), s(want), "{max_age}");
        }
    }

    #[test]
    fn space_is_freed_from_the_high_threshold_to_the_low_one() {
        let disk = |available| FsCapacity { capacity: 1000, available };
        for (available, want) in
            [(500, None), (160, None), (151, Some(49)), (150, Some(50)), (0, Some(200)), (2000, None)]
        {
            assert_eq!(bytes_to_free(disk(available), POLICY), want, "{available} of 1000 free");
        }
        assert_eq!(bytes_to_free(disk(0), ImageGcPolicy { high: 100, ..POLICY }), None);
        assert_eq!(
            (usage_percent(disk(151)), usage_percent(disk(150)), usage_percent(disk(0))),
            (85, 85, 100)
        );
    }

    #[test]
    fn the_least_recently_used_image_is_removed_first_and_used_new_or_pinned_images_stay() {
        let mut pinned = image("pinned");
        pinned.pinned = true;
        let all = [image("a"), image("b"), image("c"), pinned];
        let mut images = ImageUsage::default();
        images.observe(&all[..2], &used(&["b"]), s(100));
        images.observe(&all, &used(&["a", "r.test/b:1"]), s(200));
        images.observe(&all, &used(&["a"]), s(300));
        let space =
            |now: u64, in_use: &[&str]| ids(images.least_recently_used(&all, &used(in_use), POLICY, s(now)));
        assert_eq!(space(320, &[]), ["c", "b", "a"]);
        assert_eq!(space(320, &["c"]), ["b", "a"]);
        assert_eq!(space(319, &[]), ["b", "a"], "the youngest was first seen less than two minutes ago");
        images.observe(&all[1..], &used(&[]), s(400));
        images.observe(&all, &used(&[]), s(500));
        assert_eq!(
            ids(images.least_recently_used(&all, &used(&[]), POLICY, s(501))),
            ["c", "b"],
            "one that was gone is new again"
        );
    }

    #[test]
    fn age_counts_only_once_this_process_is_as_old() {
        let policy = ImageGcPolicy { max_age: s(1000), ..POLICY };
        let all = [image("a"), image("b")];
        let mut images = ImageUsage::default();
        images.observe(&all, &used(&["b"]), s(5000));
        let old = |now: u64| ids(images.unused_for_max_age(&all, &used(&[]), policy, s(now)));
        assert!(old(6000).is_empty());
        assert_eq!(old(6001), ["a", "b"]);
        assert!(ids(images.unused_for_max_age(&all, &used(&["a", "b"]), policy, s(9000))).is_empty());
        assert!(images.unused_for_max_age(&all, &used(&[]), POLICY, s(90_000)).is_empty(), "off");
    }
}
