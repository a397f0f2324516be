//! Panics that are injected into the work of one pod.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quintlet_kit::contain;
use quintlet_kit::failpoint::{Failpoint, Observer, observe};

/// Panics at every failpoint that the work of one pod passes on the thread of the test.
#[derive(Debug)]
pub struct PodPanics {
    uid: String,
    is_on: AtomicBool,
}

impl PodPanics {
    /// Starts to inject panics into the work of the pod with this UID. The test and all its tasks must run on
    /// this thread.
    #[must_use]
    pub fn start(uid: &str) -> Arc<Self> {
        let panics = Arc::new(Self { uid: uid.to_owned(), is_on: true.into() });
        observe(Arc::clone(&panics) as Arc<dyn Observer>);
        panics
    }

    /// Stops the injection of panics.
    pub fn stop(&self) {
        self.is_on.store(false, Ordering::SeqCst);
    }
}

impl Observer for PodPanics {
    fn reached(&self, failpoint: Failpoint) {
        let is_of_pod = contain::current().is_some_and(|work| work.uid() == self.uid);
        let is_on = self.is_on.load(Ordering::SeqCst);
        assert!(!(is_of_pod && is_on), "injected into {:?}", failpoint.name);
    }
}
