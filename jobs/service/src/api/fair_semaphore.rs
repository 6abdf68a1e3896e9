//! A semaphore that shares its permits fairly among users, tokens and stores.
//!
//! ```text
//!   acquire ─► waiting ─► permit ─► dropped
//!                 │          └─ at most: all permits, n − 1 per user, n − 2 per token, n / 2 per store (at least 1 each)
//!                 └─ next: the user who holds the fewest, then the token that holds the fewest, then the oldest request
//! ```
//!
//! A user never holds all permits, a token never all that its user may hold, and a store never more than half. So a
//! user who sends many requests, or a store that hangs, does not block the others.
//!
//! Cost: a request looks at every waiting one; at most as many wait as there are connections.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::auth::Caller;

/// The user and token of a request, and the store that it reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requester {
    user: String,
    token: Option<String>,
    store: Option<String>,
}

impl Requester {
    /// A request of this caller that reads no store.
    pub fn from_caller(caller: &Caller) -> Self {
        let token = caller.holder.as_ref().and_then(|h| h.token.clone());
        Self { user: caller.rate_key.clone(), token, store: None }
    }

    /// The same request, reading this store.
    #[must_use]
    pub fn reading(self, store: Option<String>) -> Self {
        Self { store, ..self }
    }
}

/// A fixed number of permits.
pub struct FairSemaphore {
    queue: Arc<Mutex<Queue>>,
}

/// A permit, or a place in the queue for one. Dropping it returns the permit or leaves the queue.
pub struct Permit {
    queue: Arc<Mutex<Queue>>,
    number: u64,
}

struct Queue {
    permits: usize,
    next: u64,
    /// The number and the requester of each granted request.
    holders: Vec<(u64, Requester)>,
    /// Requests that wait, oldest first.
    waiting: Vec<WaitingRequest>,
}

struct WaitingRequest {
    number: u64,
    requester: Requester,
    grant: oneshot::Sender<()>,
}

impl FairSemaphore {
    pub fn new(permits: usize) -> Self {
        let queue = Queue { permits: permits.max(1), next: 0, holders: Vec::new(), waiting: Vec::new() };
        Self { queue: Arc::new(Mutex::new(queue)) }
    }

    /// Waits for a permit.
    ///
    /// Cancel safe: dropping the future leaves the queue.
    pub async fn acquire(&self, requester: Requester) -> Permit {
        let (permit, granted) = self.enter(requester);
        // the sender lives in the queue, which `permit` keeps alive
        let _ = granted.await;
        permit
    }

    fn enter(&self, requester: Requester) -> (Permit, oneshot::Receiver<()>) {
        let (grant, granted) = oneshot::channel();
        let mut queue = lock(&self.queue);
        let number = queue.next;
        queue.next += 1;
        queue.waiting.push(WaitingRequest { number, requester, grant });
        queue.grant_next();
        drop(queue);
        (Permit { queue: Arc::clone(&self.queue), number }, granted)
    }
}

impl Queue {
    fn grant_next(&mut self) {
        while let Some(index) = self.next_index() {
            let WaitingRequest { number, requester, grant } = self.waiting.remove(index);
            self.holders.push((number, requester));
            // a permit whose receiver is gone was dropped or is about to be, and returns itself
            let _ = grant.send(());
        }
    }

    fn next_index(&self) -> Option<usize> {
        if self.holders.len() >= self.permits {
            return None;
        }
        let grantable = self.waiting.iter().enumerate().filter(|(_, w)| self.may_hold(&w.requester));
        grantable
            .min_by_key(|(_, w)| (self.held_by_user(&w.requester), self.held_by_token(&w.requester), w.number))
            .map(|(index, _)| index)
    }

    fn may_hold(&self, requester: &Requester) -> bool {
        let all_but = |n: usize| self.permits.saturating_sub(n).max(1);
        self.held_by_user(requester) < all_but(1)
            && self.held_by_token(requester) < all_but(2)
            && self.held_from_store(requester) < (self.permits / 2).max(1)
    }

    fn count(&self, is: impl Fn(&Requester) -> bool) -> usize {
        self.holders.iter().filter(|(_, holders)| is(holders)).count()
    }

    fn held_by_user(&self, requester: &Requester) -> usize {
        self.count(|a| a.user == requester.user)
    }

    fn held_by_token(&self, requester: &Requester) -> usize {
        self.count(|a| a.user == requester.user && a.token == requester.token)
    }

    fn held_from_store(&self, requester: &Requester) -> usize {
        self.count(|a| a.store.is_some() && a.store == requester.store)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut queue = lock(&self.queue);
        queue.waiting.retain(|w| w.number != self.number);
        queue.holders.retain(|(number, _)| *number != self.number);
        queue.grant_next();
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requester(user: &str, token: &str, store: Option<&str>) -> Requester {
        Requester { user: user.into(), token: Some(token.into()), store: store.map(str::to_owned) }
    }

    /// A request for a permit.
    struct PendingPermit {
        permit: Permit,
        granted: oneshot::Receiver<()>,
    }

    impl PendingPermit {
        fn is_granted(&mut self) -> bool {
            self.granted.try_recv().is_ok()
        }
    }

    fn request_permit(semaphore: &FairSemaphore, requester: Requester) -> PendingPermit {
        let (permit, granted) = semaphore.enter(requester);
        PendingPermit { permit, granted }
    }

    fn granted(pending: &mut [PendingPermit]) -> Vec<bool> {
        pending.iter_mut().map(PendingPermit::is_granted).collect()
    }

    #[test]
    fn no_user_and_no_token_holds_every_permit() {
        let semaphore = FairSemaphore::new(4);
        let mut first = [0; 5].map(|_| request_permit(&semaphore, requester("a", "a1", None)));
        assert_eq!(granted(&mut first), [true, true, false, false, false]);
        // another token of the user gets the third permit, and another user the last
        let mut second = [0; 3].map(|_| request_permit(&semaphore, requester("a", "a2", None)));
        assert_eq!(granted(&mut second), [true, false, false]);
        let mut other = request_permit(&semaphore, requester("b", "b1", None));
        assert!(other.is_granted());
        // the user with the fewest permits is next, however long the others wait
        let mut late = request_permit(&semaphore, requester("c", "c1", None));
        assert!(!late.is_granted());
        let [one, _two, mut third, ..] = first;
        drop(one);
        assert!(late.is_granted() && granted(&mut second[1..]) == [false, false]);
        // the last permit stays free although more requests of the same users wait
        drop((other.permit, late.permit));
        assert!(third.is_granted() && granted(&mut second[1..]) == [false, false]);
    }

    #[test]
    fn one_store_does_not_block_the_others() {
        let semaphore = FairSemaphore::new(4);
        let mut hanging =
            ["a", "b", "c"].map(|user| request_permit(&semaphore, requester(user, "t", Some("s3://hangs"))));
        assert_eq!(granted(&mut hanging), [true, true, false]);
        let mut others = ["s3://b", "s3://c"].map(|place| request_permit(&semaphore, requester("c", "t", Some(place))));
        assert_eq!(granted(&mut others), [true, true]);
        drop(hanging);
    }

    #[test]
    fn a_single_permit_goes_from_user_to_user() {
        let semaphore = FairSemaphore::new(1);
        let mut pending =
            ["a", "a", "a", "b"].map(|user| request_permit(&semaphore, requester(user, "t", Some("s3://a"))));
        assert_eq!(granted(&mut pending), [true, false, false, false]);
        let [first, mut second, third, mut other] = pending;
        drop(first);
        // with equal shares the oldest request is next
        assert!(second.is_granted() && !other.is_granted());
        // a dropped request leaves the queue
        drop(third);
        drop(second);
        assert!(other.is_granted());
        drop(other);
        let queue = lock(&semaphore.queue);
        assert!(queue.holders.is_empty() && queue.waiting.is_empty());
    }

    #[tokio::test]
    async fn a_request_that_is_dropped_leaves_the_queue() {
        let semaphore = FairSemaphore::new(1);
        let first = semaphore.acquire(requester("a", "t", None)).await;
        let waits =
            tokio::time::timeout(std::time::Duration::from_millis(1), semaphore.acquire(requester("b", "t", None)));
        assert!(waits.await.is_err());
        drop(first);
        drop(semaphore.acquire(requester("c", "t", None)).await);
    }
}
