//! Resolves host names that pods choose, on few threads and for a limited time.
//!
//! getaddrinfo(3) blocks a thread, cannot be cancelled, and may take minutes if a name server is silent. A
//! lookup keeps its places until getaddrinfo returns, even if its caller has gone, so that the threads for
//! blocking work stay free for others. Go's resolver, which the kubelet uses, needs no thread
//! (`net: Resolver.lookupIPAddr`).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::{contain, task};

/// Lookups of a process at once. The runtime has 512 threads for blocking work.
const LOOKUPS: usize = 32;
/// Lookups of one pod at once.
const LOOKUPS_OF_POD: usize = 2;
/// Longest wait for a lookup, including the wait for a place.
const LIMIT: Duration = Duration::from_secs(30);

/// Returns the addresses of a host name with a port.
///
/// Places are counted per pod, that of [`contain::current`]. Cancel-safe: a dropped lookup ends by itself.
///
/// # Errors
/// The name has no address, or the lookup takes longer than 30 s. The texts are Go's.
pub async fn addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    static LOOKUPS_OF_PROCESS: LazyLock<Lookups> = LazyLock::new(|| Lookups::new(LOOKUPS, LOOKUPS_OF_POD));
    let pod = contain::current().map(|work| work.uid().to_owned()).unwrap_or_default();
    let found = LOOKUPS_OF_PROCESS.run(&pod, host, Box::pin(resolve(host.to_owned()))).await?;
    Ok(found.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
}

async fn resolve(host: String) -> io::Result<Vec<IpAddr>> {
    #[expect(clippy::disallowed_methods, reason = "the one place that resolves names which pods choose")]
    let found = tokio::net::lookup_host((host.as_str(), 0)).await;
    match found.map(|found| found.map(|address| address.ip()).collect::<Vec<_>>()) {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) | Err(_) => {
            Err(io::Error::new(io::ErrorKind::NotFound, format!("lookup {host}: no such host")))
        }
    }
}

/// The places of lookups in progress.
struct Lookups {
    all: Arc<Semaphore>,
    of_pod: usize,
    pods: Arc<Mutex<HashMap<String, Arc<Semaphore>>>>,
}

impl Lookups {
    fn new(all: usize, of_pod: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(all)), of_pod, pods: Arc::default() }
    }

    async fn run<T: Send + 'static>(
        &self,
        pod: &str,
        host: &str,
        lookup: BoxFuture<'static, io::Result<T>>,
    ) -> io::Result<T> {
        let found = async {
            let place = self.place(pod).await?;
            let (send, receive) = oneshot::channel();
            task::spawn("lookup", async move {
                let found = lookup.await;
                drop(place);
                // The caller may have gone.
                let _ = send.send(found);
            });
            receive.await.ok()
        };
        match tokio::time::timeout(LIMIT, found).await {
            Ok(Some(found)) => found,
            Ok(None) | Err(_) => {
                Err(io::Error::new(io::ErrorKind::TimedOut, format!("lookup {host}: i/o timeout")))
            }
        }
    }

    async fn place(&self, pod: &str) -> Option<Place> {
        let of_pod = {
            let mut pods = self.pods.lock();
            // A semaphore that only this map has is free.
            pods.retain(|_, places| Arc::strong_count(places) > 1);
            Arc::clone(pods.entry(pod.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(self.of_pod))))
        };
        let own = of_pod.acquire_owned().await.ok()?;
        let all = Arc::clone(&self.all).acquire_owned().await.ok()?;
        Some(Place { _own: own, _all: all })
    }
}

struct Place {
    _own: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn hanging(count: &Arc<AtomicUsize>) -> BoxFuture<'static, io::Result<()>> {
        let count = Arc::clone(count);
        Box::pin(async move {
            count.fetch_add(1, Ordering::Relaxed);
            std::future::pending().await
        })
    }

    #[tokio::test(start_paused = true)]
    async fn names_that_hang_delay_lookups_of_no_other_pod() {
        let lookups = Lookups::new(8, 2);
        let started = Arc::new(AtomicUsize::new(0));
        let many = (0..20).map(|n| {
            let host = format!("slow-{n}.test");
            let (lookups, hanging) = (&lookups, hanging(&started));
            async move { lookups.run("greedy", &host, hanging).await.unwrap_err().to_string() }
        });
        let begun = tokio::time::Instant::now();
        let (errors, other) = tokio::join!(futures::future::join_all(many), async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let quick = lookups.run("other", "quick.test", Box::pin(async { Ok(7) })).await.unwrap();
            (quick, begun.elapsed())
        });
        assert_eq!(other, (7, Duration::from_secs(1)));
        assert_eq!(begun.elapsed(), LIMIT);
        assert_eq!(errors[19], "lookup slow-19.test: i/o timeout");
        // The places stay taken by the lookups that have not ended, although their callers have gone.
        assert_eq!(started.load(Ordering::Relaxed), 2);
        let again = lookups.run("greedy", "late.test", hanging(&started)).await.unwrap_err();
        assert_eq!((again.kind(), started.load(Ordering::Relaxed)), (io::ErrorKind::TimedOut, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_is_free_again_after_its_lookup() {
        let lookups = Lookups::new(1, 1);
        for n in 0..3 {
            let found = lookups.run("p", "a.test", Box::pin(async move { Ok(n) })).await.unwrap();
            assert_eq!(found, n);
        }
        let lost = lookups.run("q", "b.test", Box::pin(async { Err::<(), _>(io::Error::other("no")) })).await;
        assert_eq!(lost.unwrap_err().to_string(), "no");
        assert!(lookups.pods.lock().len() <= 1, "no entry is kept for each pod");
    }
}
