//! The filter of log lines, which can be replaced while the process runs.

use std::fmt;
use std::str::FromStr as _;

use parking_lot::Mutex;
use tracing_subscriber::filter::{EnvFilter, ParseError};
use tracing_subscriber::reload;

/// Log targets of libraries that are off unless the filter names them. They log failures that their callers
/// handle and log: the client of the API server logs each refused connection as an error, its watcher each
/// error response.
pub const SILENCED_TARGETS: [&str; 2] = ["kube_client::client::builder", "kube_runtime::watcher"];

/// Keeps the audit log (accesses to containers) on, whatever the filter. The last directive for a target
/// applies.
const AUDIT_DIRECTIVE: &str = "audit=info";

/// Longest filter, in bytes.
const LONGEST: usize = 4096;

static CURRENT: Mutex<Option<CurrentFilter>> = Mutex::new(None);

/// The filter of the process.
struct CurrentFilter {
    replace: Box<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send>,
    text: String,
    /// The filter that applies again when the time of `text` is over.
    lasting: String,
    /// Number of changes so far.
    changes: u64,
}

/// A change of the filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterChange {
    /// The filter of before.
    pub previous: String,
    /// Identifies the change for [`restore`].
    pub number: u64,
}

/// The filter of log lines was not replaced.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The filter is invalid.
    #[error("failed to parse the log filter {given:?}: {error}")]
    Invalid {
        /// The filter as it was given.
        given: String,
        /// The error of its syntax.
        error: ParseError,
    },
    /// The filter has more than 4,096 bytes.
    #[error("the log filter has more than {LONGEST} bytes")]
    TooLong,
    /// The process has another subscriber, or none.
    #[error("this process does not filter its log lines")]
    NotInstalled,
}

impl fmt::Debug for CurrentFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CurrentFilter").field("text", &self.text).finish_non_exhaustive()
    }
}

/// Parses a `tracing` filter and adds the directives that always apply.
pub(crate) fn parse(text: &str) -> Result<EnvFilter, ParseError> {
    let silenced: String = SILENCED_TARGETS.iter().map(|target| format!("{target}=off,")).collect();
    EnvFilter::from_str(&format!("{silenced}{text},{AUDIT_DIRECTIVE}"))
}

/// Keeps the handle of the filter that the process starts with.
pub(crate) fn install<S: 'static>(handle: reload::Handle<EnvFilter, S>, text: &str) {
    let replace = Box::new(move |filter| handle.reload(filter));
    let (text, lasting) = (text.to_owned(), text.to_owned());
    *CURRENT.lock() = Some(CurrentFilter { replace, text, lasting, changes: 0 });
}

/// Returns the filter of the process. `None` if the process does not filter its log lines.
#[must_use]
pub fn current() -> Option<String> {
    CURRENT.lock().as_ref().map(|filter| filter.text.clone())
}

/// Replaces the filter. One that does not last is replaced again by [`restore`].
///
/// # Errors
/// The filter is invalid, or the process does not filter its log lines. The filter stays as it was.
pub fn replace(text: &str, lasts: bool) -> Result<FilterChange, FilterError> {
    if text.len() > LONGEST {
        return Err(FilterError::TooLong);
    }
    let parsed = parse(text).map_err(|error| FilterError::Invalid { given: text.to_owned(), error })?;
    let mut current = CURRENT.lock();
    let filter = current.as_mut().ok_or(FilterError::NotInstalled)?;
    (filter.replace)(parsed).map_err(|_| FilterError::NotInstalled)?;
    let previous = std::mem::replace(&mut filter.text, text.to_owned());
    if lasts {
        text.clone_into(&mut filter.lasting);
    }
    filter.changes = filter.changes.wrapping_add(1);
    Ok(FilterChange { previous, number: filter.changes })
}

/// Ends a change that does not last: the filter that was last set to stay applies again. Returns it; `None`
/// if the filter was replaced meanwhile.
#[must_use]
pub fn restore(number: u64) -> Option<String> {
    let mut current = CURRENT.lock();
    let filter = current.as_mut().filter(|filter| filter.changes == number)?;
    // It was parsed before.
    (filter.replace)(parse(&filter.lasting).ok()?).ok()?;
    filter.text.clone_from(&filter.lasting);
    Some(filter.text.clone())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

    use super::*;

    struct Count(Arc<AtomicUsize>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Count {
        fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn refused_connections_are_logged_by_the_library_only_if_the_filter_names_it() {
        for (level, want) in [("info", 1), ("debug", 1), ("info,kube_client::client::builder=error", 2)] {
            let logged = Arc::new(AtomicUsize::new(0));
            let layer = Count(logged.clone()).with_filter(parse(level).unwrap());
            tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
                tracing::error!(target: "kube_client::client::builder", "failed with error client error (Connect)");
                tracing::warn!(target: "kube_runtime::watcher", "watch list error with 403");
                tracing::warn!("failed to list pods");
            });
            assert_eq!(logged.load(Ordering::Relaxed), want, "{level}");
        }
        assert!(parse("a=b=c").is_err());
    }

    #[test]
    fn the_audit_log_is_written_with_any_filter() {
        for level in ["info", "warn", "off", "error,audit=off", "pod_sync=debug"] {
            let logged = Arc::new(AtomicUsize::new(0));
            let layer = Count(logged.clone()).with_filter(parse(level).unwrap());
            tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
                tracing::info!(target: "audit", "audit");
            });
            assert_eq!(logged.load(Ordering::Relaxed), 1, "{level}");
        }
    }

    #[test]
    fn a_filter_is_replaced_for_good_or_until_its_time_is_over() {
        let logged = Arc::new(AtomicUsize::new(0));
        let (filter, handle) = reload::Layer::new(parse("info").unwrap());
        let subscriber = tracing_subscriber::registry().with(Count(logged.clone()).with_filter(filter));
        tracing::subscriber::with_default(subscriber, || {
            let counts = || {
                logged.store(0, Ordering::Relaxed);
                tracing::info!("a line");
                tracing::debug!("a line of details");
                logged.load(Ordering::Relaxed)
            };
            assert!(matches!(replace("debug", true), Err(FilterError::NotInstalled)));
            install(handle, "info");
            assert_eq!((counts(), current().as_deref()), (1, Some("info")));
            let brief = replace("debug", false).unwrap();
            assert_eq!((counts(), brief.previous.as_str()), (2, "info"));
            let off = replace("off", false).unwrap();
            assert_eq!((counts(), off.previous.as_str()), (0, "debug"));
            assert_eq!(restore(brief.number), None, "it was replaced meanwhile");
            assert_eq!(restore(off.number).as_deref(), Some("info"));
            assert_eq!(counts(), 1);
            let lasting = replace("debug", true).unwrap();
            let brief = replace("warn", false).unwrap();
            assert_eq!((counts(), brief.previous.as_str()), (0, "debug"));
            assert_eq!((restore(lasting.number), restore(brief.number).as_deref()), (None, Some("debug")));
            assert_eq!(counts(), 2);
            assert!(matches!(replace("a=b=c", true), Err(FilterError::Invalid { .. })));
            assert!(matches!(replace(&"a,".repeat(3000), true), Err(FilterError::TooLong)));
            assert_eq!((counts(), current().as_deref()), (2, Some("debug")));
        });
    }
}
