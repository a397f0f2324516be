//! A cache of review results with expiry. It is bounded; the least recently used entry is removed first.

use std::num::NonZeroUsize;
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;
use quintlet_kit::clock::deadline_after;
use tokio::time::Instant;

use crate::digest::Digest;

/// Maximum number of entries. A key has 32 bytes.
const CAPACITY: NonZeroUsize = NonZeroUsize::new(4096).expect("4096 is not zero");

/// Results by the digest of the question.
#[derive(Debug)]
pub struct Cache<V> {
    entries: Mutex<LruCache<Digest, (Instant, V)>>,
}

impl<V: Clone> Default for Cache<V> {
    fn default() -> Self {
        Self { entries: Mutex::new(LruCache::new(CAPACITY)) }
    }
}

impl<V: Clone> Cache<V> {
    /// Returns a result, unless it has expired.
    pub fn get(&self, key: &Digest, now: Instant) -> Option<V> {
        let mut entries = self.entries.lock();
        let (until, value) = entries.get(key)?;
        if *until > now {
            return Some(value.clone());
        }
        entries.pop(key);
        None
    }

    /// Stores a result for `ttl`.
    pub fn put(&self, key: Digest, value: V, now: Instant, ttl: Duration) {
        if !ttl.is_zero() {
            self.entries.lock().put(key, (deadline_after(now, ttl), value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::of_parts;

    #[tokio::test(start_paused = true)]
    async fn a_result_expires() {
        let cache = Cache::default();
        let k = of_parts([b"a".as_slice()]);
        cache.put(k, 1, Instant::now(), Duration::from_secs(2));
        tokio::time::advance(Duration::from_millis(1999)).await;
        assert_eq!(cache.get(&k, Instant::now()), Some(1));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(cache.get(&k, Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_cache_never_exceeds_its_capacity() {
        let cache = Cache::default();
        for i in 0..CAPACITY.get() as u64 + 10 {
            cache.put(of_parts([i.to_le_bytes().as_slice()]), i, Instant::now(), Duration::from_secs(9));
        }
        assert_eq!(cache.entries.lock().len(), CAPACITY.get());
        assert_eq!(cache.get(&of_parts([0u64.to_le_bytes().as_slice()]), Instant::now()), None);
    }
}
