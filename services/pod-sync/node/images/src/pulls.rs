//! Limits concurrent image pulls and their rate (`pkg/kubelet/images: imagePuller`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pod_sync_node_decisions::image_name;
use quintlet_kit::rate::{Rate, RateLimiter};
use tokio::sync::Semaphore;

/// Default of concurrent pulls from one registry.
const PER_REGISTRY: usize = 4;
/// Default of concurrent pulls in total, of which one slow registry can take half.
const IN_ALL: usize = 8;
/// Default of `registryBurst`.
const BURST: u32 = 10;

/// Settings of the kubelet; `None` if not set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PullSettings {
    /// `serializeImagePulls`.
    pub serialize: Option<bool>,
    /// `maxParallelImagePulls`.
    pub max_parallel: Option<usize>,
    /// `registryPullQPS`; 0 means no limit.
    pub qps: Option<u32>,
    /// `registryBurst`.
    pub burst: Option<u32>,
}

/// `serializeImagePulls` and `maxParallelImagePulls` exclude each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("maxParallelImagePulls cannot be larger than 1 unless serializeImagePulls is false")]
pub struct ContradictorySettings;

/// The limit of pulls per second.
#[derive(Debug)]
enum PullRate {
    Unlimited,
    /// The burst is 0, which allows no pull.
    Never,
    Limited(Mutex<RateLimiter>),
}

impl PullRate {
    fn new(per_second: u32, burst: u32) -> Self {
        match Rate::new(per_second, burst) {
            None => Self::Unlimited,
            Some(_) if burst == 0 => Self::Never,
            Some(rate) => Self::Limited(Mutex::new(RateLimiter::new(rate))),
        }
    }
}

/// Limits of image pulls, per registry and in total, so that a slow registry does not delay all others.
#[derive(Debug)]
pub struct PullLimits {
    all: Semaphore,
    per_registry: usize,
    registries: Mutex<HashMap<String, Arc<Semaphore>>>,
    rate: PullRate,
}

impl PullLimits {
    /// Builds the limits.
    ///
    /// # Errors
    /// The settings contradict each other.
    pub fn new(settings: PullSettings) -> Result<Self, ContradictorySettings> {
        let PullSettings { serialize, max_parallel, qps, burst } = settings;
        let (all, per_registry) = match (serialize, max_parallel) {
            (Some(true), Some(2..)) => return Err(ContradictorySettings),
            (Some(true), _) | (None, Some(0 | 1)) => (1, 1),
            (None, None) => (IN_ALL, PER_REGISTRY),
            (_, Some(most)) => (most.max(1), most.max(1)),
            (Some(false), None) => (Semaphore::MAX_PERMITS, Semaphore::MAX_PERMITS),
        };
        let rate = PullRate::new(qps.unwrap_or(0), burst.unwrap_or(BURST));
        Ok(Self { all: Semaphore::new(all), per_registry, registries: Mutex::default(), rate })
    }

    /// Returns whether the rate limit allows a pull at CLOCK_BOOTTIME `now`. If not, the pull has failed.
    pub fn try_start(&self, now: Duration) -> bool {
        match &self.rate {
            PullRate::Unlimited => true,
            PullRate::Never => false,
            PullRate::Limited(limiter) => limiter.lock().try_take(now),
        }
    }

    /// Runs a pull once the limits of its registry and in total allow it.
    pub async fn run<T>(&self, image: &str, pull: impl Future<Output = T>) -> T {
        let semaphore = {
            let repository = image_name::repository(image);
            let mut registries = self.registries.lock();
            // Semaphores of registries without pulls are dropped.
            registries.retain(|_, semaphore| Arc::strong_count(semaphore) > 1);
            let semaphore = registries.entry(image_name::registry(&repository).to_owned());
            Arc::clone(semaphore.or_insert_with(|| Arc::new(Semaphore::new(self.per_registry))))
        };
        let _first = semaphore.acquire().await;
        let _second = self.all.acquire().await;
        pull.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    // Returns the most concurrent pulls of one registry and in total, with 20 pulls from each of two
    // registries.
    async fn most(settings: PullSettings) -> (usize, usize) {
        let limits = PullLimits::new(settings).unwrap();
        let counts: [AtomicUsize; 6] = Default::default();
        let pulls = (0..40).map(|i| {
            let (limits, counts) = (&limits, &counts);
            async move {
                let which = i % 2;
                // Names of images in the default registry have no host.
                let image = [format!("busybox:{i}"), format!("r.test/app:{i}")][which].clone();
                let work = async {
                    for at in [which, 2] {
                        let now = counts[at].fetch_add(1, Ordering::Relaxed) + 1;
                        counts[at + 3].fetch_max(now, Ordering::Relaxed);
                    }
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    for at in [which, 2] {
                        counts[at].fetch_sub(1, Ordering::Relaxed);
                    }
                };
                limits.run(&image, work).await;
            }
        });
        futures::future::join_all(pulls).await;
        let count = |i: usize| counts[i].load(Ordering::Relaxed);
        (count(3).max(count(4)), count(5))
    }

    #[tokio::test(start_paused = true)]
    async fn pulls_are_as_many_as_the_settings_allow() {
        let unset = PullSettings::default();
        for (settings, want) in [
            (unset, (4, 8)),
            (PullSettings { serialize: Some(true), ..unset }, (1, 1)),
            (PullSettings { serialize: Some(true), max_parallel: Some(1), ..unset }, (1, 1)),
            (PullSettings { max_parallel: Some(1), ..unset }, (1, 1)),
            (PullSettings { max_parallel: Some(3), ..unset }, (3, 3)),
            (PullSettings { serialize: Some(false), max_parallel: Some(12), ..unset }, (12, 12)),
            (PullSettings { serialize: Some(false), ..unset }, (20, 40)),
        ] {
            let got = most(settings).await;
            assert_eq!(got.1, want.1, "{settings:?}");
            assert!(got.0 <= want.0, "{settings:?}: {got:?}");
        }
        let both = PullSettings { serialize: Some(true), max_parallel: Some(2), ..unset };
        assert_eq!(PullLimits::new(both).err(), Some(ContradictorySettings));
    }

    #[test]
    fn pulls_begin_as_often_as_the_bucket_allows() {
        let limits =
            |qps, burst| PullLimits::new(PullSettings { qps, burst, ..PullSettings::default() }).unwrap();
        let begun = |limits: &PullLimits, at: u64| {
            (0..20).filter(|_| limits.try_start(Duration::from_secs(at))).count()
        };
        assert_eq!(begun(&limits(None, None), 1), 20);
        assert_eq!(begun(&limits(Some(0), None), 1), 20);
        let five = limits(Some(5), None);
        assert_eq!((begun(&five, 100), begun(&five, 101), begun(&five, 200)), (10, 5, 10));
        assert_eq!(begun(&limits(Some(5), Some(2)), 100), 2);
    }
}
