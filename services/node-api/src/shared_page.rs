//! A page that is gathered once for all who request it at about the same time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use tokio::sync::watch;

use node_api_base::answer::{Answer, error};

/// How long a page is served after it was gathered.
const FRESH: Duration = Duration::from_secs(1);

/// A page whose gathering takes the time of other services. One gathering runs at a time, and the next one
/// begins at least a second after it has ended. An error is a page, too.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedPage(Arc<Mutex<Current>>);

/// The page that is being gathered or fresh, if any.
type Current = Option<watch::Receiver<Gathered>>;
/// The page, or none as long as it is being gathered.
type Gathered = Option<Response<Bytes>>;

impl SharedPage {
    /// Returns the page that is fresh or being gathered, or gathers it.
    ///
    /// Cancellation safety: a caller that goes away does not cancel the gathering.
    pub(crate) async fn get<F>(&self, gather: impl FnOnce() -> F) -> Answer
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let mut current = self.join_or_begin(gather);
        // The sender is dropped without a page only if the process stops.
        match current.wait_for(Option::is_some).await.ok().and_then(|page| page.clone()) {
            Some(page) => page.map(Into::into),
            None => error(StatusCode::SERVICE_UNAVAILABLE, "the node API stops"),
        }
    }

    fn join_or_begin<F>(&self, gather: impl FnOnce() -> F) -> watch::Receiver<Gathered>
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let mut current = self.0.lock();
        if let Some(page) = &*current {
            return page.clone();
        }
        let (sender, page) = watch::channel(None);
        *current = Some(page.clone());
        let (shared, gathering) = (self.clone(), gather());
        drop(task::spawn("shared-page", async move {
            sender.send_replace(Some(whole(gathering).await));
            tokio::time::sleep(FRESH).await;
            // The next request gathers again. The page of an idle node uses no memory.
            *shared.0.lock() = None;
        }));
        page
    }
}

/// Awaits a page with its body. A panic is an error of this page only.
async fn whole(gathering: impl Future<Output = Answer>) -> Response<Bytes> {
    let page = async {
        let (head, body) = gathering.await.into_parts();
        let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        Response::from_parts(head, body)
    };
    match contained_request(None, page).await {
        Ok(page) => page,
        Err(panic) => {
            let mut page = Response::new(Bytes::from(format!("node-api {panic}\n")));
            *page.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            page
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use node_api_base::answer::text;

    /// Counts gatherings. Each takes some time, and its page is its number.
    #[derive(Clone, Default)]
    struct Source {
        begun: Arc<AtomicUsize>,
        running: Arc<AtomicUsize>,
        takes: Duration,
    }

    impl Source {
        fn taking(takes: Duration) -> Self {
            Self { takes, ..Self::default() }
        }

        async fn gather(self) -> Answer {
            let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
            assert_eq!(self.running.fetch_add(1, Ordering::Relaxed), 0, "one gathering at a time");
            tokio::time::sleep(self.takes).await;
            self.running.fetch_sub(1, Ordering::Relaxed);
            text(StatusCode::OK, number.to_string())
        }

        async fn request(&self, page: &SharedPage) -> String {
            let answer = page.get(|| self.clone().gather()).await;
            assert_eq!(answer.status(), StatusCode::OK);
            assert_eq!(answer.headers()["content-type"], "text/plain; charset=utf-8");
            String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_who_wait_share_one_gathering() {
        let (page, source) = (SharedPage::default(), Source::taking(Duration::from_secs(10)));
        let early = futures::future::join_all((0..50).map(|_| source.request(&page)));
        let late = async {
            tokio::time::sleep(Duration::from_secs(9)).await;
            source.request(&page).await
        };
        let (early, late) = tokio::join!(early, late);
        assert!(early.iter().all(|body| body == "1"), "{early:?}");
        assert_eq!(late, "1");
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_is_served_for_a_second_and_gathered_again_afterwards() {
        let (page, source) = (SharedPage::default(), Source::default());
        assert_eq!(source.request(&page).await, "1");
        tokio::time::sleep(Duration::from_millis(900)).await;
        assert_eq!(source.request(&page).await, "1");
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(source.request(&page).await, "2", "the request before did not extend it");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_without_a_pause_cause_a_gathering_per_second_at_most() {
        let (page, source) = (SharedPage::default(), Source::taking(Duration::from_millis(300)));
        let begin = tokio::time::Instant::now();
        while begin.elapsed() < Duration::from_secs(60) {
            source.request(&page).await;
            tokio::time::sleep(Duration::from_millis(7)).await;
        }
        let begun = source.begun.load(Ordering::Relaxed);
        assert!((40..=47).contains(&begun), "one per 1.3 s: {begun}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_goes_away_does_not_cancel_the_gathering_of_others() {
        let (page, source) = (SharedPage::default(), Source::taking(Duration::from_secs(10)));
        let gone = tokio::time::timeout(Duration::from_secs(1), source.request(&page)).await;
        assert!(gone.is_err());
        assert_eq!(source.request(&page).await, "1");
        // The second gathering is left by its only caller.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let gone = tokio::time::timeout(Duration::from_secs(1), source.request(&page)).await;
        assert!(gone.is_err());
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(source.request(&page).await, "3", "a page that nobody fetched is not kept");
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_is_an_error_for_all_who_wait_and_the_next_gathering_succeeds() {
        let (page, source) = (SharedPage::default(), Source::default());
        let failing = || async { page.get(|| async { panic!("of the page") }).await };
        let (one, two) = tokio::join!(failing(), failing());
        for answer in [one, two] {
            assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            assert!(String::from_utf8_lossy(&body).contains("of the page"));
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(source.request(&page).await, "1");
    }
}
