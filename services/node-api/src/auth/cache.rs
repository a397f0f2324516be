//! Answers that count for a while: bounded, oldest out first.

use std::num::NonZeroUsize;
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;
use quintlet_kit::clock::deadline_after;
use tokio::time::Instant;

/// Answers kept, of each kind: more users than a node has ever seen at a time; a key is 32 bytes.
const CAPACITY: NonZeroUsize = NonZeroUsize::new(4096).expect("4096 is not zero");

/// SHA-256 of what was asked: a cache holds no token.
pub type Key = [u8; 32];

/// Answers by what was asked.
#[derive(Debug)]
pub struct Cache<V> {
    entries: Mutex<LruCache<Key, (Instant, V)>>,
}

impl<V: Clone> Default for Cache<V> {
    fn default() -> Self {
        Self { entries: Mutex::new(LruCache::new(CAPACITY)) }
    }
}

impl<V: Clone> Cache<V> {
    /// The answer, unless its time is over.
    pub fn get(&self, key: &Key, now: Instant) -> Option<V> {
        let mut entries = self.entries.lock();
        let (until, value) = entries.get(key)?;
        if *until > now {
            return Some(value.clone());
        }
        entries.pop(key);
        None
    }

    /// Keeps an answer for `ttl`.
    pub fn put(&self, key: Key, value: V, now: Instant, ttl: Duration) {
        if !ttl.is_zero() {
            self.entries.lock().put(key, (deadline_after(now, ttl), value));
        }
    }
}

/// The key of a question, each part with its length so that none runs into the next.
pub fn key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Key {
    use sha2::{Digest as _, Sha256};
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_counts_until_its_time_is_over() {
        let cache = Cache::default();
        let k = key([b"a".as_slice()]);
        cache.put(k, 1, Instant::now(), Duration::from_secs(2));
        tokio::time::advance(Duration::from_millis(1999)).await;
        assert_eq!(cache.get(&k, Instant::now()), Some(1));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(cache.get(&k, Instant::now()), None);
        assert_ne!(key([b"ab".as_slice(), b"c"]), key([b"a".as_slice(), b"bc"]));
    }

    #[tokio::test(start_paused = true)]
    async fn it_never_holds_more_than_its_bound() {
        let cache = Cache::default();
        for i in 0..CAPACITY.get() as u64 + 10 {
            cache.put(key([i.to_le_bytes().as_slice()]), i, Instant::now(), Duration::from_secs(9));
        }
        assert_eq!(cache.entries.lock().len(), CAPACITY.get());
        assert_eq!(cache.get(&key([0u64.to_le_bytes().as_slice()]), Instant::now()), None);
    }
}
