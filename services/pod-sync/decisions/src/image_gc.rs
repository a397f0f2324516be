//! Selects images for removal (`pkg/kubelet/images: freeSpace`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Settings (`imageGCHighThresholdPercent` and its kin).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGcPolicy {
    /// Percent of the disk in use from which on images go. 100: never for space.
    pub high: u8,
    /// Percent in use at which enough have gone.
    pub low: u8,
    /// None goes that was first seen less than this ago.
    pub min_age: Duration,
    /// One that nobody used for so long goes, whatever the disk. Zero: never.
    pub max_age: Duration,
}

/// How often images are looked at and, where needed, removed (pkg/kubelet/kubelet.go).
const PERIOD: Duration = Duration::from_secs(5 * 60);

impl ImageGcPolicy {
    /// Until the next look, no less than `least`. An age below the kubelet's period is not kept waiting for it.
    #[must_use]
    pub fn period(&self, least: Duration) -> Duration {
        if self.max_age.is_zero() { PERIOD } else { self.max_age.clamp(least, PERIOD.max(least)) }
    }

    /// There is nothing to do.
    #[must_use]
    pub fn is_disabled(&self) -> bool {
        self.high >= 100 && self.max_age.is_zero()
    }
}

/// An image as the runtime lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Id.
    pub id: String,
    /// Tags and digests it is known by.
    pub names: Vec<String>,
    /// Bytes.
    pub size: u64,
    /// The runtime itself needs it.
    pub pinned: bool,
}

/// What is known of an image, on boottime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageUse {
    /// When it was listed first.
    pub first: Duration,
    /// When something used it last; the first look if nothing did.
    pub used: Duration,
}

/// The images of the node over time.
#[derive(Debug, Clone, Default)]
pub struct ImageUsage {
    seen: BTreeMap<String, ImageUse>,
    // When the first look was: what is older than this process is not known.
    since: Option<Duration>,
}

/// The file system images lie on, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FsCapacity {
    /// Size.
    pub capacity: u64,
    /// Free.
    pub available: u64,
}

impl ImageUsage {
    /// Takes note of what is there. `in_use` has ids and names.
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

    // Unused ones, the longest unused first, then the longest known.
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

    /// Images that nobody used for `max_age`. Nothing before the process itself is as old.
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

    /// Images in the order in which they may go for space.
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

/// Percent of a disk in use.
#[must_use]
pub fn usage_percent(disk: FsCapacity) -> u64 {
    let free = u128::from(disk.available.min(disk.capacity)).saturating_mul(100);
    // A disk without capacity has nothing free.
    let percent = free.checked_div(u128::from(disk.capacity)).unwrap_or(0);
    100_u64.saturating_sub(u64::try_from(percent).unwrap_or(100))
}

/// Bytes to free; none below the threshold.
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
    fn a_short_age_is_looked_at_as_often() {
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
    fn the_longest_unused_goes_first_and_what_is_used_new_or_pinned_stays() {
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
