/* A part of `rebind.c`: which of several recipes that do the same serves a launch, as pgraph/drivers/turns.py
 * tells it (Note [An exec for each layer]). The first recipe's exec is taken meanwhile. */

enum { SIMILAR = 8 }; /* as in turns.py */

typedef struct pg_turns {
    const pg_recipe *const *recipes;
    int64_t n;
    int64_t latest; /* the one that served the last launch */
    int64_t n_slots;
    uint64_t *kept; /* the words of all slots, of launches so far */
    int64_t rows;   /* so many of them */
    int64_t room;   /* and of so many there is place for */
} pg_turns;

static uint64_t today(const pg_slot *s, const uint64_t *bases) { return bases[s->region] + (uint64_t)s->delta; }

/* Slots that say otherwise now; -1: nobody knows what the exec was set to. */
static int64_t misses(const pg_recipe *r, int64_t n_slots, const uint64_t *bases)
{
    int64_t count = 0;
    if (r->exec->held != r->number)
        return -1;
    for (int64_t i = 0; i < n_slots; i++)
        count += r->words[r->slots[i].word] != today(&r->slots[i], bases);
    return count;
}

static const pg_recipe *whose_turn(const pg_recipe *r, const uint64_t *bases)
{
    pg_turns *t = r->turns;
    if (t->rows < t->room) {
        for (int64_t i = 0; i < t->n_slots; i++)
            t->kept[t->rows * t->n_slots + i] = today(&r->slots[i], bases);
        t->rows++;
    }
    int64_t after = (t->latest + 1) % t->n, best = after, least = t->n_slots + 1, unused = -1;
    for (int64_t k = -1; k < t->n; k++) {
        int64_t i = k < 0 ? after : k;
        if (k == after)
            continue;
        int64_t missing = misses(t->recipes[i], t->n_slots, bases);
        if (missing < 0)
            unused = unused < 0 ? i : unused;
        else if (missing < least)
            best = i, least = missing;
        if (k < 0 && least * SIMILAR <= t->n_slots)
            break;
    }
    if (least * SIMILAR > t->n_slots)
        best = unused >= 0 ? unused : after;
    t->latest = best;
    return t->recipes[best];
}
