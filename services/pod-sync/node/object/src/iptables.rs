//! Chains of iptables that a kubelet makes for other components (`pkg/kubelet: initNetworkUtil`,
//! `pkg/util/iptables: Monitor`).
//!
//! - KUBE-IPTABLES-HINT shows which variant of iptables the node uses.
//! - KUBE-FIREWALL drops packets to 127.0.0.0/8 from elsewhere. kube-proxy has the same rule.
//! - KUBE-KUBELET-CANARY is gone after a flush of all rules, which then are made again.

use std::io;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::clock::deadline_after;
use quintlet_kit::command::Commands;
use quintlet_kit::task::blocking;
use quintlet_kit::timers::pause;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Interval between checks of the canary.
const PERIOD: Duration = Duration::from_secs(60);
/// Interval between checks whether a flush has reached the other tables.
const FLUSH_POLL: Duration = Duration::from_millis(100);
/// Time for these checks.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// Exit code of iptables if another process holds its lock (`RESOURCE_PROBLEM` of its sources).
const IS_LOCKED: i32 = 4;
/// Time limit of a command. It waits up to five seconds for the lock of iptables.
const LIMIT: Duration = Duration::from_secs(60);

const HINT: &str = "KUBE-IPTABLES-HINT";
const FIREWALL: &str = "KUBE-FIREWALL";
const CANARY: &str = "KUBE-KUBELET-CANARY";
const MANGLE: &str = "mangle";
const FILTER: &str = "filter";
/// Tables with a canary. The first one is checked.
const CANARY_TABLES: [&str; 3] = [MANGLE, "nat", FILTER];
/// The rule of [`FIREWALL`], word for word that of kube-proxy.
const DROP_FOREIGN_LOOPBACK: [&str; 16] = [
    "-m",
    "comment",
    "--comment",
    "block incoming localnet connections",
    "--dst",
    "127.0.0.0/8",
    "!",
    "--src",
    "127.0.0.0/8",
    "-m",
    "conntrack",
    "!",
    "--ctstate",
    "RELATED,ESTABLISHED,DNAT",
    "-j",
    "DROP",
];

/// A family of addresses, with a command of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum IpFamily {
    /// iptables.
    V4,
    /// ip6tables.
    V6,
}

impl IpFamily {
    fn command(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }
}

/// How a command of iptables has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandEnd {
    /// The command succeeded: the chain or rule exists, or was made.
    Succeeded,
    /// The command ended with exit code 1: the chain exists already, or there is no such chain or rule.
    Refused,
}

/// Runs iptables. Tests replace it.
pub trait Iptables: Send + Sync + 'static {
    /// Runs the command of a family. Blocks.
    ///
    /// # Errors
    /// The command is missing, hangs, or failed with another exit code than 1.
    fn run(&self, family: IpFamily, arguments: &[&str]) -> io::Result<CommandEnd>;
}

/// The commands iptables and ip6tables of the machine.
#[derive(Debug, Default)]
pub struct SystemIptables {
    commands: Commands,
}

impl Iptables for SystemIptables {
    fn run(&self, family: IpFamily, arguments: &[&str]) -> io::Result<CommandEnd> {
        let mut command = Command::new(family.command());
        command.args(["-w", "5"]).args(arguments);
        let ended = self.commands.run(command, LIMIT)?;
        match ended.status.code() {
            Some(1) => Ok(CommandEnd::Refused),
            Some(IS_LOCKED) => Err(io::ErrorKind::ResourceBusy.into()),
            _ => ended.success().map(|_| CommandEnd::Succeeded),
        }
    }
}

/// Makes the chains, and makes them again after a flush, until `stop`. The chains stay. Ends at once on a
/// node without iptables.
pub async fn keep_chains(iptables: Arc<dyn Iptables>, stop: CancellationToken) {
    let mut families = Vec::new();
    for family in [IpFamily::V4, IpFamily::V6] {
        let tables = Arc::clone(&iptables);
        // A small chain: one of CNI plugins may have more rules than a command may print. A lock is no reason
        // to give up.
        let has_family = blocking(move || has_chain(&*tables, family, MANGLE, "PREROUTING")).await;
        let is_busy =
            |error: io::Error| matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::TimedOut);
        if has_family.unwrap_or_else(is_busy) {
            families.push((family, false));
        }
    }
    if families.is_empty() {
        tracing::info!("iptables is not available, not making the chains for other components");
        return;
    }
    loop {
        for (family, is_made) in &mut families {
            if *is_made {
                match stop.run_until_cancelled(was_flushed(&iptables, *family)).await {
                    Some(true) => {}
                    Some(false) => continue,
                    None => return,
                }
            }
            let (tables, family) = (Arc::clone(&iptables), *family);
            *is_made = match blocking(move || make(&*tables, family)).await {
                Ok(()) => {
                    tracing::info!(command = family.command(), "made chains of iptables");
                    true
                }
                Err(error) => {
                    tracing::info!(command = family.command(), %error, "failed to make chains of iptables");
                    false
                }
            };
        }
        // Dropping the pause ends the loop.
        tokio::select! {
            () = stop.cancelled() => return,
            () = pause(PERIOD) => {}
        }
    }
}

/// Returns whether all rules were flushed. Waits until the flush has reached all tables, five seconds at
/// most.
async fn was_flushed(iptables: &Arc<dyn Iptables>, family: IpFamily) -> bool {
    let tables = Arc::clone(iptables);
    // A canary that cannot be checked, since the lock of iptables is taken, counts as existing.
    let check = move || has_chain(&*tables, family, CANARY_TABLES[0], CANARY).unwrap_or(true);
    if blocking(check).await {
        return false;
    }
    let until = deadline_after(Instant::now(), FLUSH_LIMIT);
    while Instant::now() < until {
        let tables = Arc::clone(iptables);
        let others = move || {
            CANARY_TABLES[1..].iter().any(|table| has_chain(&*tables, family, table, CANARY).unwrap_or(true))
        };
        if !blocking(others).await {
            break;
        }
        pause(FLUSH_POLL).await;
    }
    true
}

/// Makes all chains and rules of a family that are missing. Blocks.
fn make(iptables: &dyn Iptables, family: IpFamily) -> io::Result<()> {
    ensure_chain(iptables, family, MANGLE, HINT)?;
    if family == IpFamily::V4 {
        ensure_chain(iptables, family, FILTER, FIREWALL)?;
        ensure_rule(iptables, family, "-I", "OUTPUT", &["-j", FIREWALL])?;
        ensure_rule(iptables, family, "-I", "INPUT", &["-j", FIREWALL])?;
        ensure_rule(iptables, family, "-A", FIREWALL, &DROP_FOREIGN_LOOPBACK)?;
    }
    CANARY_TABLES.iter().try_for_each(|table| ensure_chain(iptables, family, table, CANARY))
}

fn has_chain(iptables: &dyn Iptables, family: IpFamily, table: &str, chain: &str) -> io::Result<bool> {
    Ok(iptables.run(family, &["-S", chain, "-t", table])? == CommandEnd::Succeeded)
}

fn ensure_chain(iptables: &dyn Iptables, family: IpFamily, table: &str, chain: &str) -> io::Result<()> {
    // The command is refused if the chain exists.
    iptables.run(family, &["-N", chain, "-t", table]).map(|_| ())
}

/// Adds a rule to a chain of the table filter unless it has it.
fn ensure_rule(
    iptables: &dyn Iptables,
    family: IpFamily,
    add: &str,
    chain: &str,
    rule: &[&str],
) -> io::Result<()> {
    let arguments = |operation| [&[operation, chain, "-t", FILTER], rule].concat();
    if iptables.run(family, &arguments("-C"))? == CommandEnd::Succeeded {
        return Ok(());
    }
    match iptables.run(family, &arguments(add))? {
        CommandEnd::Succeeded => Ok(()),
        CommandEnd::Refused => Err(io::Error::other(format!("no rule could be added to {chain}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use parking_lot::Mutex;
    use tokio::time::sleep;

    use super::*;

    /// Chains and rules as `family table chain [rule]`, in no order.
    #[derive(Debug, Default)]
    struct FakeIptables {
        families: Vec<IpFamily>,
        present: Mutex<BTreeSet<String>>,
        is_locked: Mutex<bool>,
        runs: Mutex<usize>,
    }

    impl FakeIptables {
        fn new(families: &[IpFamily]) -> Arc<Self> {
            let present: BTreeSet<String> = families
                .iter()
                .flat_map(|family| {
                    ["mangle PREROUTING", "filter OUTPUT", "filter INPUT"].map(|s| format!("{family:?} {s}"))
                })
                .collect();
            Arc::new(Self { families: families.to_vec(), present: Mutex::new(present), ..Self::default() })
        }

        /// Removes all but the built-in chains.
        fn flush(&self) {
            self.present.lock().retain(|entry| !entry.contains("KUBE-"));
        }

        fn own(&self) -> Vec<String> {
            self.present.lock().iter().filter(|entry| entry.contains("KUBE-")).cloned().collect()
        }
    }

    impl Iptables for FakeIptables {
        fn run(&self, family: IpFamily, arguments: &[&str]) -> io::Result<CommandEnd> {
            *self.runs.lock() += 1;
            if !self.families.contains(&family) {
                return Err(io::ErrorKind::NotFound.into());
            }
            if *self.is_locked.lock() {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            let [operation, chain, "-t", table, rule @ ..] = arguments else { panic!("{arguments:?}") };
            let chain = format!("{family:?} {table} {chain}");
            let entry = if rule.is_empty() { chain.clone() } else { format!("{chain} {}", rule.join(" ")) };
            let mut present = self.present.lock();
            let is_done = match *operation {
                "-S" | "-C" => present.contains(&entry),
                "-N" => present.insert(entry),
                "-A" | "-I" => present.contains(&chain) && present.insert(entry),
                other => panic!("{other}"),
            };
            Ok(if is_done { CommandEnd::Succeeded } else { CommandEnd::Refused })
        }
    }

    const V4: [&str; 8] = [
        "V4 filter INPUT -j KUBE-FIREWALL",
        "V4 filter KUBE-FIREWALL",
        "V4 filter KUBE-FIREWALL -m comment --comment block incoming localnet connections --dst 127.0.0.0/8 ! \
         --src 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
        "V4 filter KUBE-KUBELET-CANARY",
        "V4 filter OUTPUT -j KUBE-FIREWALL",
        "V4 mangle KUBE-IPTABLES-HINT",
        "V4 mangle KUBE-KUBELET-CANARY",
        "V4 nat KUBE-KUBELET-CANARY",
    ];
    const V6: [&str; 4] = [
        "V6 filter KUBE-KUBELET-CANARY",
        "V6 mangle KUBE-IPTABLES-HINT",
        "V6 mangle KUBE-KUBELET-CANARY",
        "V6 nat KUBE-KUBELET-CANARY",
    ];

    /// Waits until the chains are `wanted`, in virtual time.
    async fn wait_for(iptables: &FakeIptables, wanted: &[&str]) {
        let deadline = Instant::now() + 3 * PERIOD;
        while iptables.own() != wanted {
            assert!(Instant::now() < deadline, "{:?}", iptables.own());
            sleep(Duration::from_millis(50)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn chains_are_made_once_and_again_after_a_flush() {
        let iptables = FakeIptables::new(&[IpFamily::V4, IpFamily::V6]);
        let stop = CancellationToken::new();
        let kept = quintlet_kit::task::spawn("iptables", keep_chains(iptables.clone(), stop.clone()));
        let all = [&V4[..], &V6[..]].concat();
        wait_for(&iptables, &all).await;
        let runs = || *iptables.runs.lock();
        let made = runs();
        sleep(PERIOD + Duration::from_secs(1)).await;
        assert_eq!(runs(), made + 2, "one check of the canary per family");
        iptables.flush();
        wait_for(&iptables, &all).await;
        // A chain alone is no flush.
        iptables.present.lock().remove("V4 mangle KUBE-IPTABLES-HINT");
        sleep(2 * PERIOD).await;
        assert!(!iptables.own().contains(&"V4 mangle KUBE-IPTABLES-HINT".to_owned()));
        stop.cancel();
        kept.await.unwrap();
        assert!(iptables.own().contains(&"V4 filter KUBE-FIREWALL".to_owned()), "the chains stay");
    }

    #[tokio::test(start_paused = true)]
    async fn a_locked_or_missing_iptables_costs_nothing_but_a_later_attempt() {
        let none = FakeIptables::new(&[]);
        keep_chains(none.clone(), CancellationToken::new()).await;
        assert_eq!(*none.runs.lock(), 2, "the task ends at once");

        let iptables = FakeIptables::new(&[IpFamily::V4]);
        // A rule cannot be added to a chain that is missing.
        iptables.present.lock().remove("V4 filter OUTPUT");
        let stop = CancellationToken::new();
        let kept = quintlet_kit::task::spawn("iptables", keep_chains(iptables.clone(), stop.clone()));
        wait_for(&iptables, &["V4 filter KUBE-FIREWALL", "V4 mangle KUBE-IPTABLES-HINT"]).await;
        iptables.present.lock().insert("V4 filter OUTPUT".to_owned());
        wait_for(&iptables, &V4).await;
        iptables.present.lock().remove("V4 mangle KUBE-IPTABLES-HINT");
        let without_hint = iptables.own();
        *iptables.is_locked.lock() = true;
        sleep(2 * PERIOD).await;
        *iptables.is_locked.lock() = false;
        sleep(2 * PERIOD).await;
        assert_eq!(
            iptables.own(),
            without_hint,
            "a lock is no flush, after which the chains would be made again"
        );
        stop.cancel();
        kept.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_lock_at_the_start_delays_the_chains() {
        let iptables = FakeIptables::new(&[IpFamily::V4]);
        *iptables.is_locked.lock() = true;
        let stop = CancellationToken::new();
        let kept = quintlet_kit::task::spawn("iptables", keep_chains(iptables.clone(), stop.clone()));
        sleep(PERIOD + Duration::from_secs(1)).await;
        assert_eq!(iptables.own(), [""; 0]);
        *iptables.is_locked.lock() = false;
        wait_for(&iptables, &V4).await;
        stop.cancel();
        kept.await.unwrap();
    }

    #[test]
    fn the_chains_for_other_components_are_made_and_kept_in_a_network_namespace() {
        // The commands inherit the network namespace of this thread, which has no rules.
        let thread = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("root");
            let iptables = SystemIptables::default();
            let list = |table: &str| {
                let mut command = Command::new("iptables");
                command.args(["-S", "-t", table]);
                Commands::new().run(command, LIMIT).unwrap().success().unwrap()
            };
            assert!(has_chain(&iptables, IpFamily::V4, MANGLE, "PREROUTING").unwrap());
            assert!(!has_chain(&iptables, IpFamily::V4, MANGLE, HINT).unwrap());
            for _ in 0..2 {
                make(&iptables, IpFamily::V4).unwrap();
            }
            let filter = list(FILTER);
            let lines = |text: &str| filter.lines().filter(|line| line.contains(text)).count();
            for rule in [
                "-N KUBE-FIREWALL",
                "-N KUBE-KUBELET-CANARY",
                "-A INPUT -j KUBE-FIREWALL",
                "-A OUTPUT -j KUBE-FIREWALL",
                "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment \"block incoming localnet \
                 connections\" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
            ] {
                assert_eq!(lines(rule), 1, "{rule} in {filter}");
            }
            assert!(list(MANGLE).contains("-N KUBE-IPTABLES-HINT"), "{}", list(MANGLE));
            assert!(list("nat").contains("-N KUBE-KUBELET-CANARY"), "{}", list("nat"));
        });
        thread.join().unwrap();
    }
}
