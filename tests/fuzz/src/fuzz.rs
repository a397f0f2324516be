//! Runs a target on a limited number of inputs, or for a limited time.
// Processor time and the budget of a run are real time: nothing here is paused.
#![allow(clippy::disallowed_methods)]

use std::hash::Hasher as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use proptest::strategy::BoxedStrategy;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use quintlet_testkit::budget::cases;

use crate::bytes::TargetInputs;

/// Environment variable with the seconds for which each target runs.
pub const SECONDS_ENV: &str = "QUINTLET_FUZZ_SECONDS";
/// Inputs of each target, if no seconds are given.
const INPUTS: u32 = 4_096;
/// Inputs between two reads of the clock.
const BATCH: u32 = 32;
/// Time limit for shrinking an input.
const SHRINK_MS: u32 = 5_000;
/// Limit of processor time for one input. The slowest real target takes a tenth of it in a debug build.
const CPU: Duration = Duration::from_secs(1);
/// Time after which an input counts as endless.
const HANGS: Duration = Duration::from_secs(20);

/// Checks an input. The error describes the failure.
pub type Check = fn(&[u8]) -> Result<(), String>;

/// An input whose check failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailingInput {
    /// The input, shrunk.
    pub input: Vec<u8>,
    /// Description of the failure.
    pub why: String,
}

/// End of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// Number of inputs. It does not depend on the machine.
    Inputs(u64),
    /// Wall time.
    Time(Duration),
}

impl std::ops::Mul<u32> for Budget {
    type Output = Self;

    fn mul(self, factor: u32) -> Self {
        match self {
            Self::Inputs(inputs) => Self::Inputs(inputs * u64::from(factor)),
            Self::Time(time) => Self::Time(time * factor),
        }
    }
}

/// Returns the budget of each target.
///
/// # Panics
/// Panics if the environment variable is not a number of seconds.
#[must_use]
pub fn budget() -> Budget {
    match std::env::var(SECONDS_ENV) {
        Ok(text) => {
            let seconds =
                text.parse().unwrap_or_else(|_| panic!("{SECONDS_ENV}: {text:?} is no number of seconds"));
            Budget::Time(Duration::from_secs(seconds))
        }
        Err(_) => Budget::Inputs(cases(INPUTS).into()),
    }
}

/// Checks one input, including its processor time.
///
/// # Errors
/// Returns a description of the failure.
pub fn one(check: Check, input: &[u8]) -> Result<(), String> {
    let began = cpu();
    let checked = check(input);
    let took = cpu().saturating_sub(began);
    checked?;
    if took > CPU {
        return Err(format!("{} bytes take {took:?} of processor time", input.len()));
    }
    Ok(())
}

fn cpu() -> Duration {
    let now = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has the clock of a thread");
    Duration::from(now)
}

/// Runs `check` on the inputs of a target until one fails or the budget is used. Returns the number of
/// inputs.
///
/// # Errors
/// Returns the first failure, shrunk.
///
/// # Panics
/// Panics if the thread of the target ends without a result.
pub fn run(
    target: &'static str,
    inputs: fn() -> TargetInputs,
    check: Check,
    budget: Budget,
) -> Result<u64, Box<FailingInput>> {
    let current = Arc::new(std::sync::Mutex::new(None));
    let (sender, results) = mpsc::channel();
    let shown = Arc::clone(&current);
    std::thread::spawn(move || {
        let strategy = inputs().strategy(target);
        let outcome = until_found(&strategy, check, budget, &shown);
        // The receiver is dropped once the thread has exceeded its limit.
        let _ = sender.send(outcome);
    });
    loop {
        match results.recv_timeout(Duration::from_millis(100)) {
            Ok(outcome) => return outcome.map_err(Box::new),
            Err(RecvTimeoutError::Timeout) => {
                // No input exists before the strategy is built, which takes a while.
                let now = current.lock().expect("no thread panics with this lock").clone();
                if let Some((input, _)) = now.filter(|(_, since): &(_, Instant)| since.elapsed() > HANGS) {
                    return Err(Box::new(FailingInput {
                        input,
                        why: format!("does not end within {HANGS:?}"),
                    }));
                }
            }
            Err(RecvTimeoutError::Disconnected) => panic!("the thread of the target is gone"),
        }
    }
}

fn until_found(
    strategy: &BoxedStrategy<Vec<u8>>,
    check: Check,
    budget: Budget,
    current: &std::sync::Mutex<Option<(Vec<u8>, Instant)>>,
) -> Result<u64, FailingInput> {
    let began = Instant::now();
    let mut tried = 0;
    let is_left = |tried| match budget {
        Budget::Inputs(inputs) => tried < inputs,
        Budget::Time(time) => began.elapsed() < time,
    };
    while is_left(tried) {
        let config = Config {
            cases: BATCH,
            failure_persistence: None,
            max_shrink_time: SHRINK_MS,
            ..Config::default()
        };
        let outcome = TestRunner::new(config).run(strategy, |input: Vec<u8>| {
            *current.lock().expect("no thread panics with this lock") = Some((input.clone(), Instant::now()));
            one(check, &input).map_err(TestCaseError::fail)
        });
        match outcome {
            Ok(()) => tried += u64::from(BATCH),
            Err(TestError::Fail(why, input)) => {
                return Err(FailingInput { input, why: why.message().to_owned() });
            }
            Err(TestError::Abort(why)) => {
                return Err(FailingInput { input: Vec::new(), why: format!("no input was made: {why}") });
            }
        }
    }
    Ok(tried)
}

/// Writes a failing input into the corpus, to be committed with its fix. Returns the path.
///
/// # Panics
/// Panics if it cannot be written.
#[must_use]
pub fn keep(target: &str, found: &FailingInput) -> PathBuf {
    let mut hash = fnv::FnvHasher::default();
    hash.write(&found.input);
    let file = crate::bytes::corpus_dir(target).join(format!("found-{:016x}", hash.finish()));
    std::fs::write(&file, &found.input).expect("the corpus can be written to");
    file
}
