//! Contains panics to the work of one pod, and records the pod that a thread works on.
//!
//! [`contained`] polls a future with the pod's [`Work`] set on the thread and returns a panic as a [`Panic`].
//! A panic outside of such work ends the process: see [`crate::task`]. The panic hook logs both, with the
//! source location and the pod.
//!
//! An observer of [`crate::failpoint`] can end the process of a test. Its panic is not contained.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::task::{Context, Poll};

use http::{HeaderMap, HeaderValue};

/// Exit code of a process that ends because of a panic (`sysexits.h`: `EX_SOFTWARE`).
pub const EXIT_PANIC: i32 = 70;

/// Metadata of a request: UID of the pod that the request is for. A service that panics in the request logs
/// the UID.
pub const POD_UID_HEADER: &str = "quintlet-pod-uid";

/// Metadata of a request: the pod is critical (`pkg/kubelet/types: IsCriticalPod`), so its calls precede
/// those of others.
pub const CRITICAL_HEADER: &str = "quintlet-critical";

/// A panic that was contained.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("panicked at {location}: {message}")]
pub struct Panic {
    /// The panic message.
    pub message: String,
    /// Source file, line and column.
    pub location: String,
}

/// Callbacks for when a thread starts and stops executing the work of a pod. Both are called for each poll:
/// they must be cheap, and must not panic.
pub trait OnThread: Send + Sync {
    /// Called when a thread starts executing the work.
    fn enters(&self);
    /// Called when that thread stops executing the work.
    fn leaves(&self);
}

struct Named {
    uid: String,
    name: String,
    is_critical: bool,
    on_thread: Option<Box<dyn OnThread>>,
}

/// Identifies work by the pod that it is for. Clones refer to the same work.
#[derive(Clone)]
pub struct Work(Arc<Named>);

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("uid", &self.0.uid).field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl Work {
    /// Returns work for the pod with this UID. `name` is `namespace/name`, and may be empty if it is unknown.
    #[must_use]
    pub fn new(uid: impl Into<String>, name: impl Into<String>) -> Self {
        Self::named(uid.into(), name.into(), None)
    }

    /// Returns work as [`Work::new`] does, and calls `on_thread` when a thread starts and stops executing it.
    #[must_use]
    pub fn marked(
        uid: impl Into<String>,
        name: impl Into<String>,
        on_thread: impl OnThread + 'static,
    ) -> Self {
        let on_thread: Option<Box<dyn OnThread>> = Some(Box::new(on_thread));
        Self::named(uid.into(), name.into(), on_thread)
    }

    fn named(uid: String, name: String, on_thread: Option<Box<dyn OnThread>>) -> Self {
        Self(Arc::new(Named { uid, name, is_critical: false, on_thread }))
    }

    /// Returns work that has no clones yet, with the priority of the pod.
    #[must_use]
    pub fn with_priority(mut self, is_critical: bool) -> Self {
        if let Some(named) = Arc::get_mut(&mut self.0) {
            named.is_critical = is_critical;
        }
        self
    }

    /// Returns whether the pod is critical.
    #[must_use]
    pub fn is_critical(&self) -> bool {
        self.0.is_critical
    }

    /// Returns the UID of the pod.
    #[must_use]
    pub fn uid(&self) -> &str {
        &self.0.uid
    }

    /// Returns `namespace/name` of the pod; empty if it is unknown.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the pod that a request names in its metadata ([`POD_UID_HEADER`], [`CRITICAL_HEADER`]).
    #[must_use]
    pub fn of_request(headers: &HeaderMap) -> Option<Self> {
        let uid = headers.get(POD_UID_HEADER)?.to_str().ok()?;
        Some(Self::new(uid, "").with_priority(headers.contains_key(CRITICAL_HEADER)))
    }

    /// Marks this thread as executing the work until the guard is dropped.
    fn enter(&self) -> OnThisThread {
        if let Some(on_thread) = &self.0.on_thread {
            on_thread.enters();
        }
        OnThisThread { before: CURRENT.replace(Some(self.clone())) }
    }
}

struct OnThisThread {
    before: Option<Work>,
}

impl Drop for OnThisThread {
    fn drop(&mut self) {
        let work = CURRENT.replace(self.before.take());
        if let Some(on_thread) = work.as_ref().and_then(|work| work.0.on_thread.as_ref()) {
            on_thread.leaves();
        }
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Work>> = const { RefCell::new(None) };
    // The newest panic of this thread, which the hook passes to `caught`.
    static LAST: RefCell<Option<Panic>> = const { RefCell::new(None) };
}

/// Returns the work that this thread executes, if any.
#[must_use]
pub fn current() -> Option<Work> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// Adds UID and priority of the pod that this thread works for, if its UID is known, to the headers of a
/// request.
pub fn name_pod(headers: &mut HeaderMap) {
    let Some(work) = current().filter(|work| !work.uid().is_empty()) else { return };
    if let Ok(uid) = HeaderValue::try_from(work.uid()) {
        headers.insert(POD_UID_HEADER, uid);
    }
    if work.is_critical() {
        headers.insert(CRITICAL_HEADER, HeaderValue::from_static("true"));
    }
}

/// Runs a future as work of a pod. Returns a panic of the future.
///
/// Cancellation safety: the same as that of the future.
///
/// # Errors
/// Fails if the future panicked. State that it shares with other tasks may be inconsistent.
pub fn contained<F: Future>(work: Work, future: F) -> Contained<F> {
    contained_request(Some(work), future)
}

/// Runs a future as [`contained`] does, for a request that may not name a pod.
///
/// # Errors
/// Fails as [`contained`] does.
pub fn contained_request<F: Future>(work: Option<Work>, future: F) -> Contained<F> {
    hook();
    Contained { work, future }
}

pin_project_lite::pin_project! {
    /// A future that is executed as work of a pod, from [`contained`].
    // No async block, which would have room for two copies of the future.
    #[derive(Debug)]
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct Contained<F> {
        work: Option<Work>,
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for Contained<F> {
    type Output = Result<F::Output, Panic>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let on_thread = this.work.as_ref().map(Work::enter);
        let polled = catch_unwind(AssertUnwindSafe(|| this.future.poll(cx)));
        drop(on_thread);
        match polled {
            Ok(Poll::Ready(value)) => Poll::Ready(Ok(value)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(payload) => Poll::Ready(Err(caught(payload))),
        }
    }
}

/// Runs a function as [`contained`] runs a future.
///
/// # Errors
/// Fails as [`contained`] does.
pub fn contained_now<T>(work: &Work, act: impl FnOnce() -> T) -> Result<T, Panic> {
    hook();
    let on_thread = work.enter();
    let done = catch_unwind(AssertUnwindSafe(act));
    drop(on_thread);
    done.map_err(caught)
}

/// A panic caught on a blocking thread, to be resumed in the task that waits for the thread.
pub(crate) struct CaughtPanic {
    payload: Box<dyn Any + Send>,
    last: Option<Panic>,
}

impl CaughtPanic {
    /// Resumes the panic on this thread.
    pub(crate) fn resume(self) -> ! {
        LAST.set(self.last);
        resume_unwind(self.payload)
    }
}

/// Executes `act` on this thread as part of the work of the calling thread.
pub(crate) fn on_blocking_thread<T>(work: Option<Work>, act: impl FnOnce() -> T) -> Result<T, CaughtPanic> {
    let on_thread = work.as_ref().map(Work::enter);
    let done = catch_unwind(AssertUnwindSafe(act));
    drop(on_thread);
    done.map_err(|payload| CaughtPanic { payload, last: LAST.take() })
}

/// Converts a payload that [`std::panic::catch_unwind`] returned on this thread to a [`Panic`].
pub(crate) fn caught(payload: Box<dyn Any + Send>) -> Panic {
    if ends_test(&*payload) {
        resume_unwind(payload);
    }
    // The hook is not called for `resume_unwind`; the payload then has only the message.
    LAST.take()
        .unwrap_or_else(|| Panic { message: message(&*payload).to_owned(), location: "unknown".to_owned() })
}

// Whether an observer of failpoints ends the process of a test with this payload.
#[cfg(feature = "failpoints")]
fn ends_test(payload: &(dyn Any + Send)) -> bool {
    payload.is::<crate::failpoint::ProcessEnded>()
}

#[cfg(not(feature = "failpoints"))]
fn ends_test(_: &(dyn Any + Send)) -> bool {
    false
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

// Whether a panic outside of contained work ends this process.
static ENDS_PROCESS: AtomicBool = AtomicBool::new(false);

/// Makes a panic of a task end the process with [`EXIT_PANIC`]. For `main` only: in tests, the panic must
/// propagate.
pub(crate) fn panics_end_process() {
    hook();
    ENDS_PROCESS.store(true, Ordering::Relaxed);
}

/// Ends the process because of a panic outside of contained work, or resumes the panic in tests.
pub(crate) fn uncontained(payload: Box<dyn Any + Send>) -> ! {
    if ENDS_PROCESS.load(Ordering::Relaxed) && !ends_test(&*payload) {
        std::process::exit(EXIT_PANIC);
    }
    resume_unwind(payload)
}

static HOOK: Once = Once::new();

fn hook() {
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let panic = Panic {
                message: message(info.payload()).to_owned(),
                location: info.location().map_or_else(|| "unknown".to_owned(), ToString::to_string),
            };
            let is_logged = log_panic(&panic);
            // The thread-local is gone while a thread ends; such a panic is not contained.
            let _ = LAST.try_with(|last| *last.borrow_mut() = Some(panic));
            if !is_logged {
                before(info);
            }
        }));
    });
}

/// Logs a panic. Returns false if the previous hook must report it.
fn log_panic(panic: &Panic) -> bool {
    let Panic { message, location } = panic;
    if let Some(work) = current() {
        tracing::error!(
            pod.name = work.name(),
            pod.uid = work.uid(),
            panic = message,
            location,
            "work of a pod panicked"
        );
        return true;
    }
    let is_process = ENDS_PROCESS.load(Ordering::Relaxed);
    if is_process {
        tracing::error!(panic = message, location, "panicked");
    }
    is_process
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::failpoint::ProcessEnded;
    use crate::task::blocking;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<&'static str>>>);

    impl OnThread for Log {
        fn enters(&self) {
            self.0.lock().push("enters");
        }
        fn leaves(&self) {
            self.0.lock().push("leaves");
        }
    }

    fn uid() -> Option<String> {
        current().map(|work| work.uid().to_owned())
    }

    #[tokio::test]
    async fn a_panic_ends_only_the_work_of_its_pod_and_is_returned_with_its_location() {
        let work = Work::new("u1", "default/a");
        let panic = contained(work.clone(), async {
            tokio::task::yield_now().await;
            assert_eq!(uid().as_deref(), Some("u1"));
            panic!("index {} is wrong", 3)
        })
        .await
        .map(|(): ()| ())
        .unwrap_err();
        assert_eq!(panic.message, "index 3 is wrong");
        assert!(panic.location.contains("contain.rs:"), "{panic}");
        assert_eq!(uid(), None, "the thread still has the pod's work");
        let panic = contained_now(&work, || -> () { panic!("at once") }).unwrap_err();
        assert_eq!(panic.message, "at once");
        assert_eq!(contained(work, async { 1 }).await, Ok(1));
    }

    #[test]
    fn the_priority_of_a_pod_is_in_the_headers_of_its_requests() {
        for is_critical in [false, true] {
            let work = Work::new("u1", "").with_priority(is_critical);
            let mut headers = HeaderMap::new();
            contained_now(&work, || name_pod(&mut headers)).unwrap();
            let received = Work::of_request(&headers).unwrap();
            assert_eq!((received.uid(), received.is_critical()), ("u1", is_critical));
        }
    }

    #[tokio::test]
    async fn a_panic_on_a_blocking_thread_is_attributed_to_the_waiting_pod() {
        let seen = contained(Work::new("u1", ""), async { blocking(uid).await }).await;
        assert_eq!(seen, Ok(Some("u1".to_owned())));
        let panic = contained(Work::new("u1", ""), async {
            blocking(|| -> () { panic!("in a directory") }).await;
        })
        .await
        .unwrap_err();
        assert_eq!(panic.message, "in a directory");
        assert!(panic.location.contains("contain.rs:"), "{panic}");
    }

    #[tokio::test]
    async fn work_is_on_a_thread_only_while_it_is_executed() {
        let log = Log::default();
        let work = Work::marked("u1", "", log.clone());
        let watched = log.clone();
        contained(work, async move {
            assert_eq!(watched.0.lock().split_off(0), ["enters"]);
            tokio::task::yield_now().await;
            assert_eq!(watched.0.lock().split_off(0), ["leaves", "enters"]);
        })
        .await
        .unwrap();
        assert_eq!(*log.0.lock(), ["leaves"]);
    }

    #[tokio::test]
    async fn the_end_of_a_process_in_a_test_is_not_contained() {
        let ended = std::thread::spawn(|| {
            let _ = contained_now(&Work::new("u1", ""), || -> () { resume_unwind(Box::new(ProcessEnded)) });
        })
        .join();
        assert!(ended.unwrap_err().is::<ProcessEnded>());
    }
}
