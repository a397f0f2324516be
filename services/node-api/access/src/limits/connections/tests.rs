use proptest::prelude::*;

use super::super::{Share, Shares};
use super::*;

fn v4(n: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, n])
}

fn token(name: &str) -> Client {
    Client::Token(name.to_owned())
}

fn certificate(name: &str) -> Client {
    Client::Certificate(name.to_owned())
}

/// Limits of untrusted connections, of users with certificates, and of others; each as all and per user.
fn limits(strangers: usize, certificates: (usize, usize), others: (usize, usize)) -> Limits {
    let share = |(all, each)| Share { all, each };
    let connections = Shares { certificates: share(certificates), others: share(others) };
    Limits { strangers, connections, ..Limits::default() }
}

fn displaced(slots: &[&ConnectionSlot]) -> Vec<bool> {
    slots.iter().map(|slot| slot.displaced.is_cancelled()).collect()
}

#[test]
fn a_new_connection_displaces_the_oldest_untrusted_one_of_the_network_with_the_most() {
    let limits = limits(5, (9, 9), (9, 9));
    let gate = ConnectionLimiter::default();
    let enter = |address| gate.enter(address, &limits).unwrap();
    let trusted = enter(v4(1));
    trusted.claim(&token("u"), &limits).unwrap();
    let a = enter(v4(1));
    let b = enter(v4(1));
    let c = enter(v4(1));
    let (other, another) = (enter(v4(2)), enter(v4(2)));
    assert_eq!(displaced(&[&trusted, &a, &b, &c, &other, &another]), [false; 6]);
    let third = enter(v4(3));
    assert_eq!(displaced(&[&trusted, &a, &b, &c, &other]), [false, true, false, false, false]);
    // Two networks have two each: the one with the oldest connection gives way.
    let fourth = enter(v4(3));
    assert_eq!(
        displaced(&[&b, &c, &other, &another, &third, &fourth]),
        [true, false, false, false, false, false]
    );
    assert_eq!(gate.open(), 6);
    // A displaced connection has returned its slot already.
    drop((a, b));
    assert_eq!(gate.open(), 6);
}

/// Fills a table with these connections, as client, number of requests in flight, and since when it is idle.
/// The ids are their positions.
fn table(connections: &[(Option<Client>, usize, u64)]) -> Table {
    let open = connections.iter().enumerate().map(|(id, (client, in_flight, idle_since))| {
        let (network, displaced) = (Network::from(v4(1)), CancellationToken::new());
        let client = client.clone();
        let in_flight = *in_flight;
        let idle_since = *idle_since;
        (id as u64, Connection { network, client, in_flight, idle_since, displaced })
    });
    Table { next: 100, open: open.collect() }
}

#[test]
fn the_longest_idle_connection_of_the_user_with_most_gives_way() {
    use Decision::{Admit, Displace, Refuse};
    let limits = limits(2, (4, 3), (5, 3));
    let a = || Some(token("a"));
    let b = || Some(token("b"));
    let c = || Some(token("c"));
    let api = || Some(certificate("api"));
    let busy = |client: fn() -> Option<Client>| (client(), 1, 0);
    let full = vec![(a(), 0, 9), (a(), 0, 7), (a(), 1, 0), (b(), 0, 1), (b(), 0, 2)];
    let all_busy: Vec<_> = full.iter().map(|(client, ..)| (client.clone(), 1, 0)).collect();
    for (name, connections, client, want) in [
        ("there are slots", vec![(a(), 1, 0)], token("a"), Admit),
        ("untrusted connections do not count", vec![(None, 0, 0); 9], token("a"), Admit),
        ("users with certificates do not count", vec![(api(), 0, 0); 9], token("a"), Admit),
        ("all slots of others, busy", all_busy.clone(), certificate("api"), Admit),
        ("a user at its share", vec![(a(), 1, 0), (a(), 0, 5), (a(), 0, 4)], token("a"), Displace(2)),
        ("a user at its share, all busy", vec![(a(), 1, 0); 3], token("a"), Refuse),
        (
            "its idle connection is not that of another user",
            vec![(a(), 1, 0), (a(), 1, 0), (a(), 1, 0), (b(), 0, 0)],
            token("a"),
            Refuse,
        ),
        ("no slot, a new user", full.clone(), token("c"), Displace(1)),
        ("no slot, a user with fewer", full.clone(), token("b"), Displace(1)),
        ("no slot, the user with most", full.clone(), token("a"), Displace(1)),
        ("the same name with a certificate is another user", full.clone(), certificate("a"), Admit),
        ("no slot, all busy", all_busy, token("c"), Refuse),
        (
            "the user with most is busy, the next one is not",
            vec![(a(), 1, 0), (a(), 1, 0), (a(), 1, 0), (b(), 0, 8), (b(), 0, 6)],
            token("c"),
            Displace(4),
        ),
        (
            "a user with as many connections does not give way",
            vec![(a(), 1, 0), (a(), 1, 0), (b(), 0, 0), (b(), 0, 0), (c(), 1, 0)],
            token("a"),
            Refuse,
        ),
        (
            "its own idle connection gives way if no user has more",
            vec![(a(), 0, 5), (a(), 1, 0), (b(), 1, 0), (b(), 1, 0), (c(), 0, 0)],
            token("a"),
            Displace(0),
        ),
        (
            "certificates at their limit",
            [vec![busy(api); 3], vec![(Some(certificate("x")), 1, 0)]].concat(),
            certificate("y"),
            Refuse,
        ),
        ("the reserve of other certificates", vec![busy(api); 3], certificate("x"), Admit),
        ("the API server at its share", vec![busy(api); 3], certificate("api"), Refuse),
    ] {
        assert_eq!(table(&connections).decide_claim(&client, &limits), want, "{name}");
    }
}

#[test]
fn a_connection_counts_for_its_first_user() {
    let limits = limits(3, (1, 1), (2, 1));
    let gate = ConnectionLimiter::default();
    let enter = || {
        let slot = gate.enter(v4(1), &limits).unwrap();
        slot.begin();
        slot
    };
    let first = enter();
    first.claim(&token("a"), &limits).unwrap();
    first.claim(&token("b"), &limits).unwrap();
    assert_eq!(enter().claim(&token("a"), &limits), Err(ShareExceeded));
    let second = enter();
    second.claim(&token("b"), &limits).unwrap();
    assert_eq!((first.pool(), enter().pool()), (Some(Pool::Others), None));
    drop(first);
    enter().claim(&token("a"), &limits).unwrap();
}

#[test]
fn a_displaced_connection_claims_no_slot() {
    let limits = limits(1, (1, 1), (1, 1));
    let gate = ConnectionLimiter::default();
    let first = gate.enter(v4(1), &limits).unwrap();
    let second = gate.enter(v4(2), &limits).unwrap();
    assert_eq!(displaced(&[&first, &second]), [true, false]);
    assert_eq!(first.claim(&token("a"), &limits), Err(ShareExceeded));
    assert_eq!(gate.open(), 1);
    second.claim(&token("a"), &limits).unwrap();
}

/// An action of a client. Numbers select a connection modulo the number of connections.
#[derive(Debug, Clone)]
enum Action {
    Enter(u8),
    Claim(usize, Client),
    Begin(usize),
    End(usize),
    Close(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let at = || 0..64_usize;
    let client = prop_oneof![
        (0..3_u8).prop_map(|n| Client::Token(format!("t{n}"))),
        (0..2_u8).prop_map(|n| Client::Certificate(format!("c{n}"))),
        (1..3_u8).prop_map(|n| Client::Anonymous(v4(n).into())),
    ];
    prop_oneof![
        3 => (1..4_u8).prop_map(Action::Enter),
        3 => (at(), client).prop_map(|(at, client)| Action::Claim(at, client)),
        2 => at().prop_map(Action::Begin),
        2 => at().prop_map(Action::End),
        1 => at().prop_map(Action::Close),
    ]
}

/// A connection as the test knows it.
struct Known {
    slot: ConnectionSlot,
    client: Option<Client>,
    in_flight: usize,
}

/// Applies an action to the limiter and to the known connections.
fn apply(action: Action, gate: &ConnectionLimiter, known: &mut Vec<Known>, limits: &Limits) {
    let pick = |known: &[Known], at: usize| (!known.is_empty()).then(|| at % known.len());
    match action {
        Action::Enter(n) => {
            let slot = gate.enter(v4(n), limits).expect("an untrusted connection is always admitted");
            known.push(Known { slot, client: None, in_flight: 0 });
        }
        Action::Claim(at, client) => {
            let Some(at) = pick(known, at) else { return };
            if known[at].slot.claim(&client, limits).is_ok() {
                known[at].client.get_or_insert(client);
            }
        }
        Action::Begin(at) => {
            let Some(at) = pick(known, at) else { return };
            known[at].slot.begin();
            known[at].in_flight += 1;
        }
        Action::End(at) => {
            let Some(at) = pick(known, at).filter(|at| known[*at].in_flight > 0) else { return };
            known[at].slot.end();
            known[at].in_flight -= 1;
        }
        Action::Close(at) => drop(pick(known, at).map(|at| known.remove(at))),
    }
}

proptest! {
    #[test]
    fn no_slot_is_lost_or_counted_twice(actions in proptest::collection::vec(action(), 0..300)) {
        let limits = limits(4, (4, 3), (5, 2));
        let gate = ConnectionLimiter::default();
        let mut known: Vec<Known> = Vec::new();
        for action in actions {
            apply(action, &gate, &mut known, &limits);
            // A connection leaves when it is displaced; one with a request in flight only while it is
            // untrusted.
            for left in known.extract_if(.., |known| known.slot.displaced.is_cancelled()) {
                prop_assert!(left.client.is_none() || left.in_flight == 0);
            }
            prop_assert_eq!(gate.open(), known.len());
            let count = |is_counted: &dyn Fn(&Known) -> bool| known.iter().filter(|known| is_counted(known)).count();
            prop_assert!(count(&|known| known.client.is_none()) <= limits.strangers);
            for pool in Pool::ALL {
                let share = limits.connections.of(pool);
                let is_of_pool = |client: &Client| client.pool() == pool;
                prop_assert!(count(&|known| known.client.as_ref().is_some_and(is_of_pool)) <= share.all);
                for client in known.iter().filter_map(|known| known.client.as_ref()).filter(|c| is_of_pool(c)) {
                    prop_assert!(count(&|known| known.client.as_ref() == Some(client)) <= share.each);
                }
            }
            let table = gate.0.lock();
            for known in &known {
                let counted = &table.open[&known.slot.id];
                prop_assert_eq!((&counted.client, counted.in_flight), (&known.client, known.in_flight));
                prop_assert_eq!(known.slot.pool(), known.client.as_ref().map(Client::pool));
            }
        }
        known.clear();
        prop_assert_eq!(gate.open(), 0);
    }
}
