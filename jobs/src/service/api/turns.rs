//! Work that few requests may do at once, shared among those who ask.
//!
//! ```text
//!   enter ─► waits ─► at work ─► dropped
//!              │         └─ at most: all of them, a user's, a token's, a place's
//!              └─ next: of those that may begin, the user with the least at work, then the token, then who came first
//! ```
//!
//! A user is never given all of them, nor a token all that its user may have, nor a place (a store, say) more than half: whoever asks for
//! much, and whatever hangs, others wait for no more than the work that their own share does. Where there is one alone, or two, a share is one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::auth::Caller;

/// Who asks, and what their work waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asker {
    user: String,
    token: Option<String>,
    place: Option<String>,
}

impl Asker {
    /// Work for this caller, which waits for nothing but this machine.
    pub fn of(caller: &Caller) -> Self {
        let token = caller.holder.as_ref().and_then(|h| h.token.clone());
        Self { user: caller.counted_as.clone(), token, place: None }
    }

    /// The same work, where it waits for another machine.
    #[must_use]
    pub fn at(self, place: Option<String>) -> Self {
        Self { place, ..self }
    }
}

/// So many at once.
pub struct Turns {
    queue: Arc<Mutex<Queue>>,
}

/// One of them, or a place in the queue for it; given back when it is dropped.
pub struct Turn {
    queue: Arc<Mutex<Queue>>,
    number: u64,
}

struct Queue {
    most: usize,
    next: u64,
    /// Each with its number.
    at_work: Vec<(u64, Asker)>,
    /// In the order in which they came.
    waiting: Vec<Waiting>,
}

struct Waiting {
    number: u64,
    asker: Asker,
    begin: oneshot::Sender<()>,
}

impl Turns {
    pub fn new(most: usize) -> Self {
        let queue = Queue { most: most.max(1), next: 0, at_work: Vec::new(), waiting: Vec::new() };
        Self { queue: Arc::new(Mutex::new(queue)) }
    }

    /// Waits for a turn. Dropped meanwhile, it is out of the queue.
    pub async fn take(&self, asker: Asker) -> Turn {
        let (turn, begun) = self.enter(asker);
        // the other end goes with the queue, and that with the turn
        let _ = begun.await;
        turn
    }

    fn enter(&self, asker: Asker) -> (Turn, oneshot::Receiver<()>) {
        let (begin, begun) = oneshot::channel();
        let mut queue = lock(&self.queue);
        let number = queue.next;
        queue.next += 1;
        queue.waiting.push(Waiting { number, asker, begin });
        queue.begin_next();
        drop(queue);
        (Turn { queue: Arc::clone(&self.queue), number }, begun)
    }
}

impl Queue {
    fn begin_next(&mut self) {
        while let Some(index) = self.next_index() {
            let Waiting { number, asker, begin } = self.waiting.remove(index);
            self.at_work.push((number, asker));
            // who has gone meanwhile gives it back
            let _ = begin.send(());
        }
    }

    fn next_index(&self) -> Option<usize> {
        if self.at_work.len() >= self.most {
            return None;
        }
        let begin = self.waiting.iter().enumerate().filter(|(_, w)| self.may_begin(&w.asker));
        begin.min_by_key(|(_, w)| (self.of_user(&w.asker), self.of_token(&w.asker), w.number)).map(|(index, _)| index)
    }

    fn may_begin(&self, asker: &Asker) -> bool {
        let but = |n: usize| self.most.saturating_sub(n).max(1);
        self.of_user(asker) < but(1) && self.of_token(asker) < but(2) && self.of_place(asker) < (self.most / 2).max(1)
    }

    fn count(&self, is: impl Fn(&Asker) -> bool) -> usize {
        self.at_work.iter().filter(|(_, at_work)| is(at_work)).count()
    }

    fn of_user(&self, asker: &Asker) -> usize {
        self.count(|a| a.user == asker.user)
    }

    fn of_token(&self, asker: &Asker) -> usize {
        self.count(|a| a.user == asker.user && a.token == asker.token)
    }

    fn of_place(&self, asker: &Asker) -> usize {
        self.count(|a| a.place.is_some() && a.place == asker.place)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut queue = lock(&self.queue);
        queue.waiting.retain(|w| w.number != self.number);
        queue.at_work.retain(|(number, _)| *number != self.number);
        queue.begin_next();
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asker(user: &str, token: &str, place: Option<&str>) -> Asker {
        Asker { user: user.into(), token: Some(token.into()), place: place.map(str::to_owned) }
    }

    /// A turn that was asked for, and whether it has begun.
    struct Asked {
        turn: Turn,
        begun: oneshot::Receiver<()>,
    }

    impl Asked {
        fn has_begun(&mut self) -> bool {
            self.begun.try_recv().is_ok()
        }
    }

    fn ask(turns: &Turns, asker: Asker) -> Asked {
        let (turn, begun) = turns.enter(asker);
        Asked { turn, begun }
    }

    fn begun(asked: &mut [Asked]) -> Vec<bool> {
        asked.iter_mut().map(Asked::has_begun).collect()
    }

    #[test]
    fn whoever_asks_for_much_leaves_something() {
        let turns = Turns::new(4);
        let mut first = [0; 5].map(|_| ask(&turns, asker("a", "a1", None)));
        assert_eq!(begun(&mut first), [true, true, false, false, false]);
        // another token of the user has the third, and another user the last
        let mut second = [0; 3].map(|_| ask(&turns, asker("a", "a2", None)));
        assert_eq!(begun(&mut second), [true, false, false]);
        let mut other = ask(&turns, asker("b", "b1", None));
        assert!(other.has_begun());
        // who has least at work is next, however long the others wait
        let mut late = ask(&turns, asker("c", "c1", None));
        assert!(!late.has_begun());
        let [one, _two, mut third, ..] = first;
        drop(one);
        assert!(late.has_begun() && begun(&mut second[1..]) == [false, false]);
        // and the last one stays free, though others of theirs wait
        drop((other.turn, late.turn));
        assert!(third.has_begun() && begun(&mut second[1..]) == [false, false]);
    }

    #[test]
    fn one_place_does_not_hold_up_the_others() {
        let turns = Turns::new(4);
        let mut hanging = ["a", "b", "c"].map(|user| ask(&turns, asker(user, "t", Some("s3://hangs"))));
        assert_eq!(begun(&mut hanging), [true, true, false]);
        let mut others = ["s3://b", "s3://c"].map(|place| ask(&turns, asker("c", "t", Some(place))));
        assert_eq!(begun(&mut others), [true, true]);
        drop(hanging);
    }

    #[test]
    fn one_turn_goes_from_user_to_user() {
        let turns = Turns::new(1);
        let mut asked = ["a", "a", "a", "b"].map(|user| ask(&turns, asker(user, "t", Some("s3://a"))));
        assert_eq!(begun(&mut asked), [true, false, false, false]);
        let [first, mut second, third, mut other] = asked;
        drop(first);
        // equal shares: who came first
        assert!(second.has_begun() && !other.has_begun());
        // whoever goes while they wait is out of the queue
        drop(third);
        drop(second);
        assert!(other.has_begun());
        drop(other);
        let queue = lock(&turns.queue);
        assert!(queue.at_work.is_empty() && queue.waiting.is_empty());
    }

    #[tokio::test]
    async fn a_turn_that_is_not_waited_for_any_more_is_given_on() {
        let turns = Turns::new(1);
        let first = turns.take(asker("a", "t", None)).await;
        let waits = tokio::time::timeout(std::time::Duration::from_millis(1), turns.take(asker("b", "t", None)));
        assert!(waits.await.is_err());
        drop(first);
        drop(turns.take(asker("c", "t", None)).await);
    }
}
